"""Pictures asked for several at a time, where each takes long to come and another could come meanwhile."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

from PIL import Image

from precache.sources.base import SampleRef, Source

Read = Callable[[], "bytes | Image.Image"]
"""As `Source.read` of one picture."""


def read_ahead(source: Source, refs: Sequence[SampleRef], max_pixels: int) -> Iterator[Read]:
    """A `Read` of each picture in turn; of a source with `ahead` so many of them are under way."""
    ahead = getattr(source, "ahead", 0)
    if not ahead:
        yield from (partial(source.read, ref, max_pixels) for ref in refs)
        return
    with ThreadPoolExecutor(ahead) as pool:
        waiting = iter(refs)
        coming = deque(pool.submit(source.read, ref, max_pixels) for ref in islice(waiting, ahead))
        try:
            while coming:
                yield coming.popleft().result
                coming.extend(pool.submit(source.read, ref, max_pixels) for ref in islice(waiting, 1))
        finally:
            pool.shutdown(cancel_futures=True)
