"""Train a ResNet on a folder of pictures with Accelerate (`pip install accelerate`).

    python -m loaders.examples.train_accelerate data/shards --epochs 20
    accelerate launch -m loaders.examples.train_accelerate data/shards --epochs 90 --bf16 --resume

SIGTERM saves and ends with exit code 143; the same command with --resume goes on with the batches left.
"""

import argparse
import sys
from functools import partial

from accelerate import Accelerator

from loaders.examples import common
from loaders.examples.train import fit, make_parser


def train(args: argparse.Namespace, sigterm: common.Sigterm) -> int:
    """Train on this process's device, with the other ranks that Accelerate started; return the exit code."""
    accelerator = Accelerator(cpu=args.device == "cpu", mixed_precision="bf16" if args.bf16 else "no")
    args.device = str(accelerator.device)
    # The loader is built after the process group, so that it splits each epoch among the ranks by itself.
    return fit(args, accelerator.num_processes, sigterm, accelerator.prepare, accelerator.backward)


main = partial(common.main, make_parser("train_accelerate", __doc__), train)

if __name__ == "__main__":
    sys.exit(main())
