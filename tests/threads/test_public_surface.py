"""The public names."""

import pytest

import raylance


def test_public_surface() -> None:
    names = """
        BadRowError Balance BatchDecoder Batches Buckets Budget CenterCrop ClassBalanced Clip ConfigError CoverageError
        DataConfig Dataset DatasetError Decoder DeviceImage FailFast FractionSplit FrameCrop HelperError Image ImageCrop
        NamespaceTable Options Order Pack PackTokens Pad PlacementError Provenance RaggedDecoder RandomResizedCrop
        RangeSplit RankLoader RaylanceError RowShuffle RunProof SampleTable Sequential ShardShuffle StateError TokensOf
        ValueSplit Video Weighted WindowShuffle Windows add_column cu_seqlens dataset explain_run from_ray_dataset
        map_boxes map_points mix mlflow_dataset newest_checkpoint open_folder prove_run read_values report
        report_if_preempted report_run restore row_rng wandb_artifact watch write_column write_values
    """
    assert sorted(raylance.__all__) == names.split()
    found = [name for name in dir(raylance) if not name.startswith("_")]
    assert found == sorted([*raylance.__all__, "audit", "lerobot", "testing", "torch_data", "torchft"])
    for name in raylance.__all__:
        assert getattr(raylance, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = raylance.nothing
