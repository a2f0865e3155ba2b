"""Owns the Grafana dashboard and the alerts of raylance's metrics: made by code, so that both name what there is."""
