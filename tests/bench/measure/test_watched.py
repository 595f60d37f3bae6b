"""What `bench watch` measures of the changes that it names."""

from pathlib import Path

from bench.measure.watched import measure_replaced


def test_what_stands_in_for_an_imagefolder_is_measured_on_its_tree(raw_tree: Path, tmp_path: Path) -> None:
    parts = {"read": 0.0001, "decode": 0.002, "resize": 0.001, "python": 0.001}
    info = {"root": str(raw_tree), "side": 32, "batch_size": 8}
    found = {one.name: one for one in measure_replaced(info, parts, tmp_path / "shards")}
    assert list(found) == ["ImageDataset", "shards", "build", "build on shards"]
    for one in found.values():
        assert str(raw_tree) in one.write
        assert (one.rate is not None) == one.name.startswith("build")
        assert one.rate is None or one.rate.median > 0
        assert bool(one.cost) == ("shards" in one.name)
    assert 0 < found["shards"].factor.median < 1.2, "its pictures are not decoded"
    assert "precache=" in found["build on shards"].write
    assert not list(tmp_path.iterdir()), "it is a sample that was converted, elsewhere"
