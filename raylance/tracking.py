"""Describes datasets and loaders to MLflow and to Weights & Biases."""

from raylance.integrations.lineage import mlflow_dataset, wandb_artifact

__all__ = ["mlflow_dataset", "wandb_artifact"]
