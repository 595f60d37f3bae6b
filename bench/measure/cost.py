"""What a data set costs in an object storage, for each way to keep it: arithmetic, printed.

    python -m bench.measure.cost                      ImageNet-1k, ImageNet-21k, a billion pictures
    python -m bench.measure.cost --images 5000000     your own

Bytes of a picture and CPU time of converting it are those that `bench recommend` and `precache convert`
measured on photographs like ImageNet's (see precache/README.md); give your own with --photo-bytes and the
like. Prices change and differ: give yours.
"""

import click

from bench.report.cost import GB, Cost, Layout, Prices, cost, seconds_of_an_epoch
from precache.console import commandline
from precache.errors import check_range
from precache.recipe import Recipe

SETS = {"ImageNet-1k": 1_281_167, "ImageNet-21k": 14_197_122, "a billion": 1_000_000_000}
"""Pictures of the training sets: https://www.image-net.org/about.php."""
LIST = Prices()


def layouts(
    photo_bytes: float, pixels_bytes: float, jpeg_bytes: float, shards_cpu_s: float, tars_cpu_s: float
) -> list[Layout]:
    """The raw tree, and what `precache convert` makes of it."""
    per_shard = Recipe(format="shards").samples_per_shard
    return [
        Layout(name="raw tree", image_bytes=photo_bytes, object_images=1, cpu_s=0),
        Layout(name="shards", image_bytes=pixels_bytes, object_images=per_shard, cpu_s=shards_cpu_s),
        Layout(name="webdataset", image_bytes=jpeg_bytes, object_images=per_shard, cpu_s=tars_cpu_s),
    ]


@click.command(cls=commandline.Command)
@click.option("--images", type=int, help="Of your own set.  [default: three known ones]")
@click.option("--epochs", default=90, show_default=True, help="That are trained.")
@click.option("--photo-bytes", default=107_000.0, show_default=True, help="Of a photograph.")
@click.option(
    "--pixels-bytes", default=529_000.0, show_default=True, help="Of one in shards, at most 448 px."
)
@click.option(
    "--jpeg-bytes", default=110_000.0, show_default=True, help="Of one in tars, likewise, quality 95."
)
@click.option("--shards-cpu-ms", default=4.0, show_default=True, help="Of one CPU, to convert one picture.")
@click.option("--webdataset-cpu-ms", default=4.5, show_default=True, help="Likewise.")
@click.option("--mb-per-s", default=100.0, show_default=True, help="Of the line to the storage.")
@click.option("--gb-month", default=LIST.gb_month, show_default=True, help="Dollars.")
@click.option("--gets", "get", default=LIST.get, show_default=True, help="Dollars for 1,000.")
@click.option("--puts", "put", default=LIST.put, show_default=True, help="Dollars for 1,000.")
@click.option("--egress", "egress_gb", default=LIST.egress_gb, show_default=True, help="Dollars for a GB.")
@click.option("--cpu-hour", default=LIST.cpu_hour, show_default=True, help="Dollars.")
def main(
    images: int | None,
    epochs: int,
    photo_bytes: float,
    pixels_bytes: float,
    jpeg_bytes: float,
    shards_cpu_ms: float,
    webdataset_cpu_ms: float,
    mb_per_s: float,
    **prices: float,
) -> None:
    """Print size, requests, dollars, CPU hours and the least time of an epoch, for each layout."""
    check_range("epochs", epochs, 1)
    if images is not None:
        check_range("images", images, 1)
    paid = Prices(**prices)
    kinds = layouts(photo_bytes, pixels_bytes, jpeg_bytes, shards_cpu_ms / 1e3, webdataset_cpu_ms / 1e3)
    click.echo(HEAD)
    for name, count in SETS.items() if images is None else {f"{images:,} pictures": images}.items():
        for kind in kinds:
            least_s = seconds_of_an_epoch(kind, count, mb_per_s * 1e6)
            for cached in (False, True) if kind.cpu_s else (False,):
                found = cost(kind, count, epochs, cached=cached, prices=paid)
                click.echo(row(name, f"{kind.name}{', cached' if cached else ''}", found, least_s))
    click.echo(
        f"{epochs} epochs; requests and egress of all of them; an epoch: the least that it takes from the "
        f"storage at {mb_per_s:g} MB/s. Dollars: {paid.gb_month:g} a GB-month, {paid.get:g} and {paid.put:g} "
        f"for 1,000 GETs and PUTs, {paid.egress_gb:g} a GB of egress (0 within the region), "
        f"{paid.cpu_hour:g} a CPU hour."
    )


HEAD = (
    f"{'set':20}{'layout':20}{'size':>10}{'objects':>16}{'GETs':>18}{'month $':>10}{'GETs $':>10}"
    f"{'egress $':>12}{'CPU hours':>12}{'epoch':>10}"
)


def row(name: str, layout: str, found: Cost, least_s: float) -> str:
    """A line of the table."""
    size = found.stored_bytes / GB
    shown = f"{size:,.0f} GB" if size < 10_000 else f"{size / 1000:,.0f} TB"
    epoch = f"{least_s / 60:,.0f} min" if least_s < 7200 else f"{least_s / 3600:,.0f} h"
    return (
        f"{name:20}{layout:20}{shown:>10}{found.objects:>16,}{found.gets:>18,}{found.month:>10,.0f}"
        f"{found.requests:>10,.2f}{found.egress:>12,.0f}{found.cpu_hours:>12,.1f}{epoch:>10}"
    )


if __name__ == "__main__":
    main()
