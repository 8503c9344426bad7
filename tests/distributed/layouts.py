"""How two processes share a model: the configurations that TRL ships by name, cut down to two CPU processes.

Each layout also says how its parameters are read back whole, and what a process can tell of its share: that sharding
was really on is asserted, since accelerate falls back to data parallelism without a word where it finds no GPU.
"""

import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import trl
import yaml

from distributed.cases import ACCUMULATION


@dataclass(frozen=True)
class Layout:
    shipped: str
    """Name of the configuration in TRL."""
    kind: str
    """`ddp`, `fsdp` (accelerate's), `native` (transformers' own FSDP2) or `deepspeed`."""


LAYOUTS = {
    "DDP": Layout("multi_gpu", "ddp"),
    "FSDP2": Layout("fsdp2", "fsdp"),
    "FSDP2 of transformers": Layout("multi_gpu", "native"),
    "FSDP1": Layout("fsdp1", "fsdp"),
    "ZeRO-1": Layout("zero1", "deepspeed"),
    "ZeRO-2": Layout("zero2", "deepspeed"),
    "ZeRO-3": Layout("zero3", "deepspeed"),
}


def write_config(layout: Layout, folder: Path) -> Path:
    """TRL's configuration for `accelerate launch`, for two CPU processes in float32."""
    config = yaml.safe_load((Path(trl.__file__).parent / "accelerate_configs" / f"{layout.shipped}.yaml").read_text())
    config |= {"num_processes": 2, "mixed_precision": "no", "main_process_port": 0}
    if layout.kind in ("ddp", "native"):
        config["use_cpu"] = True  # with DeepSpeed or FSDP it would mean DDP
    if layout.shipped == "fsdp1":  # both go through CUDA
        config["fsdp_config"] |= {"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False}
    if layout.shipped == "zero3":  # no parameter of a tiny model is so large that ZeRO-3 partitions it by default
        zero = {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": config["deepspeed_config"]["zero3_save_16bit_model"],
        }
        settings = {
            "zero_optimization": zero,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
        (folder / "deepspeed.json").write_text(json.dumps(settings))
        del config["mixed_precision"]
        config["deepspeed_config"] = {
            "deepspeed_config_file": str(folder / "deepspeed.json"),
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": config["deepspeed_config"]["zero3_init_flag"],
        }
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def launcher_arguments(layout: Layout) -> list[str]:
    """What a user has to add to the command line."""
    if layout.shipped == "zero1":  # the only configuration that fixes the number, at 1
        return ["--gradient_accumulation_steps", str(ACCUMULATION)]
    return []


def environment(layout: Layout) -> dict[str, str]:
    """Environment of the worker processes."""
    tests = Path(__file__).parents[1]
    added = {
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if layout.kind == "fsdp":
        added["ACCELERATE_TORCH_DEVICE"] = "cpu"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    return kept | added


def prepare_process(layout: Layout) -> None:
    """In a worker, before anything is built: let the layout exist on a CPU."""
    if layout.kind == "fsdp":
        _let_accelerate_shard_on_cpu()
    if layout.kind == "deepspeed":
        _let_deepspeed_start_without_compiling()


def _let_accelerate_shard_on_cpu() -> None:
    """accelerate's state drops an FSDP plugin on a CPU; keep it."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def _let_deepspeed_start_without_compiling() -> None:
    """DeepSpeed compiles an optional operation for CPU collectives at first use: leave all of them to gloo."""
    # Not the attribute `torch` of deepspeed.comm, which is PyTorch.
    backend = importlib.import_module("deepspeed.comm.torch")
    assert callable(backend.build_shm_op)
    backend.build_shm_op = lambda: None


def model_for(layout: Layout, folder: str, dtype: str):
    """What the trainer is given: the path, or the model that transformers shards while loading."""
    if layout.kind != "native":
        return folder
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=DistributedConfig(fsdp_size=2))


def whole_parameters(layout: Layout, trainer) -> dict[str, torch.Tensor]:
    """The parameters by their names in the bare model, from all shares. Every process has to ask."""
    if layout.shipped == "zero3":
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
            return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    if layout.shipped == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(trainer.model_wrapped, writeback=False):
            return {_bare(name): p.detach().clone() for name, p in trainer.model_wrapped.named_parameters()}
    whole = {}
    for name, parameter in trainer.model.named_parameters():
        parameter = parameter.detach()
        whole[_bare(name)] = (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).clone()
    return whole


def _bare(name: str) -> str:
    for wrapper in ("module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def share(layout: Layout, trainer) -> dict:
    """What this process holds, after training."""
    wrapped = trainer.model_wrapped
    facts = {
        "distributed_type": trainer.accelerator.distributed_type.value,
        "num_processes": trainer.accelerator.num_processes,
        "wrapper": type(wrapped).__name__,
        "world_size": torch.distributed.get_world_size(),
    }
    if layout.kind == "deepspeed":
        facts["stage"] = wrapped.zero_optimization_stage()
        if facts["stage"] < 3:
            facts["numbers"] = sum(p.numel() for p in trainer.model.parameters())
            facts["numbers_here"] = facts["numbers"]
            facts["optimizer_numbers_here"] = sum(p.numel() for p in wrapped.optimizer.single_partition_of_fp32_groups)
        else:
            facts["numbers"] = sum(p.ds_numel for p in trainer.model.parameters())
            facts["numbers_here"] = sum(p.ds_tensor.numel() for p in trainer.model.parameters())
            facts["numbers_between_steps"] = sum(p.numel() for p in trainer.model.parameters())
            facts["optimizer_numbers_here"] = sum(
                p.numel() for p in wrapped.optimizer.fp32_partitioned_groups_flat if p is not None
            )
    else:
        if layout.shipped == "fsdp1":
            facts["sharded_modules"] = [
                _bare(name) for name, module in wrapped.named_modules() if type(module).__name__ == facts["wrapper"]
            ]
            facts["numbers_here"] = sum(p.numel() for p in wrapped.parameters())
        else:
            parameters = list(trainer.model.parameters())
            facts["numbers"] = sum(p.numel() for p in parameters)
            facts["numbers_here"] = sum(
                p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in parameters
            )
        facts["optimizer_numbers_here"] = sum(
            (p.to_local() if hasattr(p, "to_local") else p).numel()
            for group in trainer.optimizer.param_groups
            for p in group["params"]
        )
    return facts
