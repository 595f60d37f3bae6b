"""Train a convolutional network in JAX; our batches reach it by DLPack, without a copy.

    pip install 'precache[loaders]' 'jax[cpu]'        # with a GPU 'jax[cuda12]'
    python -m loaders.examples.train_jax data/shards

A batch is channels-last in memory, so that its NHWC view, in which JAX's convolutions are at home, is
contiguous. `jax.dlpack.from_dlpack` shares the memory of floating-point images. It copies what does not begin
at a multiple of 64 bytes, as small uint8 batches on the CPU may not, and narrows int64 labels to int32. JAX
0.4.38 to 0.10.2 take the NCHW view without a copy, too. Tried on the CPU; on a GPU not yet.
"""

import argparse
import math
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

import loaders
from loaders.examples import checkpoints, common

WIDTHS = (32, 64, 128, 256)


def as_jax(batch: loaders.Batch) -> tuple[jax.Array, jax.Array]:
    """Images, float32 [n, height, width, 3], which share the batch's memory, and labels, int32 [n]."""
    images, labels = batch
    return jax.dlpack.from_dlpack(images.permute(0, 2, 3, 1)), jax.dlpack.from_dlpack(labels.int())


def make_parameters(classes: int, seed: int) -> list[dict[str, jax.Array]]:
    """One convolution a width, then a linear layer; He initialisation."""
    layers, inputs = [], 3
    for number, width in enumerate(WIDTHS):
        key = jax.random.fold_in(jax.random.key(seed), number)
        weight = jax.random.normal(key, (3, 3, inputs, width)) * (2 / (9 * inputs)) ** 0.5
        layers.append({"weight": weight, "scale": jnp.ones(width), "bias": jnp.zeros(width)})
        inputs = width
    return [*layers, {"weight": jnp.zeros((inputs, classes)), "bias": jnp.zeros(classes)}]


def predict(parameters: list[dict[str, jax.Array]], images: jax.Array) -> jax.Array:
    """Logits, [n, classes]."""
    *layers, last = parameters
    for layer in layers:
        images = lax.conv_general_dilated(
            images, layer["weight"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        # of each picture, so that training and validation do the same
        mean, variance = (f(images, (1, 2, 3), keepdims=True) for f in (jnp.mean, jnp.var))
        images = (images - mean) * lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["bias"]
        images = jax.nn.relu(images)
    return images.mean((1, 2)) @ last["weight"] + last["bias"]


def mean_loss(parameters: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(predict(parameters, images)), labels[:, None], axis=1)
    return -chosen.mean()


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(
    parameters: Any, momenta: Any, images: jax.Array, labels: jax.Array, rate: float
) -> tuple[Any, Any, jax.Array]:
    """One step of SGD with momentum: parameters, momenta, loss."""
    loss, gradients = jax.value_and_grad(mean_loss)(parameters, images, labels)
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
    return jax.tree.map(lambda p, m: p - rate * m, parameters, momenta), momenta, loss


@partial(jax.jit)
def count_right(parameters: Any, images: jax.Array, labels: jax.Array, counts: jax.Array) -> jax.Array:
    """Of those that count, how many are recognised."""
    return jnp.sum((predict(parameters, images).argmax(1) == labels) & counts)


def find_accuracy(parameters: Any, loader: loaders.Loader) -> float:
    """The share of pictures that is recognised."""
    right = 0
    for batch in loader:
        right += int(count_right(parameters, *as_jax(batch), jnp.asarray(~batch.padding.numpy())))
    return right / loader.samples


def train(args: argparse.Namespace) -> int:
    """Train, and save after each epoch."""
    path = args.out / "checkpoint.pt"
    found = checkpoints.read(path, args)
    # batches of one size, or JAX would compile for each; no processes, which may hang when they fork beside
    # the threads of JAX
    reading = loaders.Reading(workers=0)
    training, validation = common.build_loaders(args, last="pad", reading=reading)
    with training, validation or nullcontext():
        parameters = make_parameters(len(training.classes), args.seed)
        momenta = jax.tree.map(jnp.zeros_like, parameters)
        if found is not None:
            checkpoints.restore(training, found["loader"], path)
            arrays = [jax.dlpack.from_dlpack(array, copy=True) for array in found["arrays"]]
            parameters, momenta = jax.tree.unflatten(jax.tree.structure((parameters, momenta)), arrays)
        for epoch in range(training.state_dict()["epoch"], args.epochs):
            started_s, loss = time.perf_counter(), jnp.zeros(())
            for step, batch in enumerate(training):
                done = (epoch + step / len(training)) / args.epochs
                rate = args.lr * (1 + math.cos(math.pi * done)) / 2
                parameters, momenta, loss = train_step(parameters, momenta, *as_jax(batch), rate)
            figures = {"loss": float(loss)}  # of the last batch; waits for the device
            figures["images_per_s"] = training.samples / (time.perf_counter() - started_s)
            if validation is not None:
                figures["validation_accuracy"] = find_accuracy(parameters, validation)
            arrays = [
                torch.utils.dlpack.from_dlpack(array) for array in jax.tree.leaves((parameters, momenta))
            ]
            state = training.state_dict()
            checkpoints.save(path, {"name": args.model, "arrays": arrays, "loader": state})
            common.report(epoch, figures)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; the exit code."""
    parser = common.parser("train_jax", "Train a convolutional network on a folder of pictures with JAX.")
    parser.set_defaults(device="cuda" if jax.default_backend() == "gpu" else "cpu", model="train_jax")
    args = parser.parse_args(arguments)
    for option in ("model", "bf16"):
        if getattr(args, option) != parser.get_default(option):
            parser.error(f"--{option}: this example has a network of its own, in float32; leave it out")
    return common.run("train_jax", lambda: train(args))


if __name__ == "__main__":
    sys.exit(main())
