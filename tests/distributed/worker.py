"""What each of two processes runs: all the cases of a launch, one after the other; the results in one file per process."""

import argparse
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from distributed.cases import CASES, Outcome, build, logs_of
from distributed.large import select_between_processes
from distributed.layouts import LAYOUTS, model_for, prepare_process, share, whole_parameters


def train_shared(layout, case, model, output_dir):
    if layout.shipped == "fsdp1":
        case = replace(case, dtype="float32")  # PyTorch's gradient norm of FSDP1 refuses float64
    trainer, selections = build(case, model_for(layout, model, case.dtype), output_dir, processes=2)
    trainer.train()
    facts = share(layout, trainer)
    return Outcome(whole_parameters(layout, trainer), selections.steps, logs_of(trainer), facts), trainer.accelerator


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=LAYOUTS)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    layout = LAYOUTS[options.layout]
    prepare_process(layout)
    outcomes = {}
    for name, case in CASES.items():
        started = time.monotonic()
        outcome, accelerator = train_shared(layout, case, options.model, str(options.out / "run"))
        outcomes[name] = asdict(outcome)
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    if layout.kind == "ddp":
        outcomes["large"] = select_between_processes(accelerator)
    torch.save(outcomes, options.out / f"process{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main()
    torch.distributed.barrier()
    os._exit(0)  # gloo may abort while the interpreter shuts down
