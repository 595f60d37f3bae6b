"""What ends a trial and is no fault of the program: too little memory, a model that cannot be compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from precache.errors import SettingError

_TOO_LITTLE_MEMORY = (
    "out of memory",  # CUDA, also where a later call tells, and cuDNN
    "can't allocate memory",  # torch, of main memory
    "storage size calculation overflowed",  # the same, of more than can be counted
    "alloc_failed",  # CUDNN_STATUS_ALLOC_FAILED, CUBLAS_STATUS_ALLOC_FAILED
    "allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "calling `cublascreate",  # a handle comes with a workspace
    # cuDNN, when it tunes: algorithms whose workspace does not fit are left out, until none is there
    "unable to find an engine to execute",
    "unable to find a valid cudnn algorithm",
)
_COMPILERS = ("torch._dynamo", "torch._inductor")


class DoesNotFit(SettingError):
    """The batch does not fit into memory."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory, the GPU's or the machine's, was too small: as torch, cuDNN or cuBLAS tells it."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    told = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in told for words in _TOO_LITTLE_MEMORY)


@contextmanager
def in_one_line(batch_size: int, size: int) -> Iterator[None]:
    """Say of the trial within, of such batches, what can be done about it.

    Raises:
        DoesNotFit: instead of what `out_of_memory` recognises.
        SettingError: instead of what torch.compile raises.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            raise DoesNotFit(
                f"batch_size {batch_size:,} of {size}x{size} does not fit into memory; choose a smaller one"
            ) from error
        if type(error).__module__.startswith(_COMPILERS):
            reason = next(line for line in str(error).splitlines() if line.strip())
            raise SettingError(
                f"torch.compile failed ({reason}); fix that, or leave out --compile"
            ) from error
        raise
