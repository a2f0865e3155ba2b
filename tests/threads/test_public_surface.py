"""The public names."""

import pytest

import raylance

MODULES = {  # beside the names at the top
    "audit", "errors", "images", "lerobot", "namespaces", "runs", "testing", "text", "torch_data", "torchft",
    "tracking", "writing",
}  # fmt: skip


def test_public_surface() -> None:
    names = """
        BadRowError Balance BatchDecoder Batches Buckets Budget CenterCrop ClassBalanced Clip DataConfig Dataset
        Decoder FailFast FractionSplit Image Options Order Pack Pad Patches RaggedDecoder RandomResizedCrop
        RangeSplit RankLoader RaylanceError Renamed RowShuffle SampleTable Sequential ShardShuffle StateError TokensOf
        ValueSplit Video Weighted WindowShuffle Windows dataset explain_run mix prove_run report
        report_run restore watch
    """
    assert sorted(raylance.__all__) == names.split()
    found = [name for name in dir(raylance) if not name.startswith("_")]
    assert found == sorted([*raylance.__all__, *MODULES])
    for name in raylance.__all__:
        assert getattr(raylance, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = raylance.nothing


def test_a_name_of_0_12_warns_of_its_new_place() -> None:
    moved = {
        "errors": ["ConfigError", "CoverageError", "DatasetError", "HelperError", "PlacementError"],
        "images": ["DeviceImage", "FrameCrop", "ImageCrop", "map_boxes", "map_points"],
        "namespaces": ["NamespaceTable"],
        "runs": ["RunProof", "newest_checkpoint", "open_folder", "report_if_preempted"],
        "text": ["cu_seqlens"],
        "tracking": ["mlflow_dataset", "wandb_artifact"],
        "writing": ["Provenance", "add_column", "from_ray_dataset", "read_values", "write_column", "write_values"],
    }
    for module, names in moved.items():
        home = getattr(raylance, module)
        for name in names:
            with pytest.warns(FutureWarning, match=rf"raylance\.{name} .*raylance\.{module}\.{name}"):
                found = getattr(raylance, name)
            assert found is getattr(home, name)
            assert module == "errors" or name in home.__all__
    with pytest.warns(FutureWarning, match=r"PackTokens .*raylance\.Pack\("):
        assert raylance.PackTokens("tokens", length=8).length == 8  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning, match="row_rng"):
        assert raylance.row_rng  # type: ignore[attr-defined]


def test_reading_is_not_chosen_by_hand(images_uri: str) -> None:
    with pytest.warns(FutureWarning, match="read="):
        handle = raylance.dataset(images_uri, columns=["id"], read="take")
    assert handle.take([3])["id"].tolist() == [3]


def test_the_page_of_help_names_all_names() -> None:
    page = raylance.__doc__ or ""
    assert {name for name in raylance.__all__ if f"`{name}`" not in page} == set()
    assert {name for name in MODULES if f"`raylance.{name}`" not in page} == set()
