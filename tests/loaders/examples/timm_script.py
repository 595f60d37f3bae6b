"""What timm's train.py does with its loaders, in its order: no package of timm has that file.

    python timm_script.py DATA [NAME=VALUE...]      NAMEs of create_loader, or mixup_alpha

After train.py of timm 0.9, with the arguments that 1.0's `create_loader` takes. It prints a line of JSON an
epoch.
"""

import argparse
import ast
import json
import sys

import torch
from timm import utils
from timm.data import FastCollateMixup, create_dataset, create_loader, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

EPOCHS, BATCH, CLASSES = 2, 8, 5
MIXUP_OFF_EPOCH = 1


def main() -> None:
    root, *words = sys.argv[1:]
    options = {name: ast.literal_eval(value) for name, value in (word.split("=") for word in words)}
    mixup = options.pop("mixup_alpha", 0.0)
    args = argparse.Namespace(device="cpu")
    device = utils.init_distributed_device(args)
    model = create_model("resnet10t", num_classes=CLASSES).to(device)
    config = resolve_data_config({"img_size": 32}, model=model)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01, momentum=0.9)
    of_train = create_dataset(
        "", root=root, split="train", is_training=True, batch_size=BATCH, seed=42, repeats=0
    )
    of_eval = create_dataset("", root=root, split="val", is_training=False, batch_size=BATCH)
    collate_fn = FastCollateMixup(mixup_alpha=mixup, num_classes=CLASSES) if mixup else None
    shared = {
        "input_size": config["input_size"],
        "batch_size": BATCH,
        "use_prefetcher": True,
        "device": device,
    }
    shared |= {
        "mean": config["mean"],
        "std": config["std"],
        "num_workers": 1,
        "distributed": args.distributed,
    }
    training = create_loader(
        of_train,
        is_training=True,
        collate_fn=collate_fn,
        interpolation="random",
        pin_memory=False,
        **shared,
        **options,
    )
    validation = create_loader(of_eval, is_training=False, crop_pct=config["crop_pct"], **shared)
    loss_of = SoftTargetCrossEntropy() if mixup else LabelSmoothingCrossEntropy(0.1)
    scheduler, epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=EPOCHS, warmup_epochs=0, updates_per_epoch=len(training)
    )
    seen = []
    for epoch in range(epochs):
        of_train.set_epoch(epoch)
        if epoch >= MIXUP_OFF_EPOCH and training.mixup_enabled:
            training.mixup_enabled = False
        model.train()
        for number, (images, target) in enumerate(training):
            optimizer.zero_grad()
            loss_of(model(images.contiguous(memory_format=torch.channels_last)), target).backward()
            optimizer.step()
            scheduler.step_update(num_updates=epoch * len(training) + number)
            seen.append([epoch, [*images.shape], target.tolist()])
        model.eval()
        meter = utils.AverageMeter()
        with torch.no_grad():
            for images, target in validation:
                top1, _ = utils.accuracy(model(images), target, topk=(1, 5))
                meter.update(top1.item(), len(images))
        scheduler.step(epoch + 1, meter.avg)
        print(json.dumps({"epoch": epoch, "validated": meter.count, "top1": meter.avg, "seen": seen}))
        seen = []


if __name__ == "__main__":
    main()
