"""A recommendation as settings of PyTorch: what is printed is executed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleetbench.quantities import MIB
from fleetbench.strategy import DistributedStrategy
from fleetbench.why.observed import Library
from tuner.pytorch import in_pytorch, in_words_of, page_of
from tuner.recommendation import Arm, Recommendation

OWN = DistributedStrategy(fusion="ddp", fuse_grad_size_in_MB=25.0, first_bucket_size_in_MB=1.0, sync_nccl_allreduce=False)
CAPPED = OWN.replace(first_bucket_size_in_MB=0.0)
PLAIN = {
    "caps": CAPPED.replace(fuse_grad_size_in_MB=0.5),
    "without a smaller first": CAPPED,
    "one bucket": CAPPED.replace(fuse_grad_size_in_MB=0.0),
    "a wire": CAPPED.replace(fp16_allreduce=True, fuse_grad_size_in_MB=4.0),
    "buffers": OWN.replace(broadcast_buffers=False, find_unused_parameters=True),
    "a partition": DistributedStrategy(fusion="optimal", sync_nccl_allreduce=False),
}
SIZES_MB = (8 / MIB, 24 / MIB)
"""Of the buckets of a partition: the bias of a layer with 3 inputs and 2 outputs, whose gradient comes first, and its weight."""


SUMS = {"gradient_merge_configs.k_steps", "gradient_merge_configs.avg"}
ALONE = """
import json, sys, torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
told = {}
for name, code in json.loads(sys.argv[2]).items():
    found = {"model": nn.Linear(3, 2)}
    exec(code, found)
    model = found["model"]
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
    laid_out = model._get_ddp_logging_data().get("rebuilt_bucket_sizes") if "list" in code else None
    hook = model._get_ddp_logging_data().get("comm_hook", "").rpartition(".")[2]
    told[name] = [type(model).__name__, model.bucket_bytes_cap, model.find_unused_parameters, model.broadcast_buffers, hook, laid_out]
print(json.dumps(told))
"""


def test_what_is_printed_for_pytorch_does_what_the_strategy_says(tmp_path: Path) -> None:
    """The blocks of code make a DistributedDataParallel with that cap, those arguments and that hook, and it trains."""
    pages = {name: page_of(strategy, OWN, "USE it: 1.2x", SIZES_MB) for name, strategy in PLAIN.items()}
    blocks = {
        name: re.findall(r"## In plain PyTorch\n\nBeside .*?:\n\n```python\n(.*?)```", page, re.DOTALL) for name, page in pages.items()
    }
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        ALONE,
        str(tmp_path / "store"),
        json.dumps({name: one[0] for name, one in blocks.items()}),
    ]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert told == {
        "caps": ["DistributedDataParallel", MIB // 2, False, True, "", None],
        "without a smaller first": ["DistributedDataParallel", 25 * MIB, False, True, "", None],
        "one bucket": ["DistributedDataParallel", MIB << 20, False, True, "", None],
        "a wire": ["DistributedDataParallel", 4 * MIB, False, True, "fp16_compress_hook", None],
        "buffers": ["DistributedDataParallel", 25 * MIB, True, False, "", None],
        "a partition": ["DistributedDataParallel", 24, False, True, "", "8, 24"],
    }


SHARDED = """
import json, sys
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
told = []
for code in json.loads(sys.argv[2]):
    blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    found = {"model": nn.Sequential(*blocks), "blocks": blocks}
    exec(code, found)
    units = [unit._get_fsdp_state()._fsdp_param_groups for unit in blocks]
    (first,), (second,) = units
    assert first.mp_policy == second.mp_policy
    told.append([str(first.mp_policy.param_dtype), str(first.mp_policy.reduce_dtype), first.post_forward_mesh_info is not None])
print(json.dumps(told))
"""
STAGE_3 = DistributedStrategy.from_dict({"sharding": True, "sharding_configs": {"stage": 3}})
SHORT = {"amp": True, "amp_configs": {"dtype": "bf16"}, "sharding_configs": {"param_dtype": "bfloat16"}}


def test_what_is_printed_for_fully_shard_does_what_the_strategy_says(tmp_path: Path) -> None:
    """Of a model without sharding and of one with it: the types in which parameters and gradients travel, and whether blocks reshard."""
    pairs = [
        (STAGE_3, OWN, ["None", "None", True]),
        (STAGE_3.replace(sharding_configs={"stage": 2}), OWN, ["None", "None", False]),
        (STAGE_3.replace(**SHORT), OWN.replace(amp=True, amp_configs={"dtype": "bf16"}), ["torch.bfloat16", "torch.float32", True]),
        (STAGE_3.replace(sharding_configs={"stage": 2}), STAGE_3, ["None", "None", False]),
        (STAGE_3.replace(bf16_allreduce=True), STAGE_3, ["None", "torch.bfloat16", True]),
        (STAGE_3.replace(bf16_allreduce=True, **SHORT), STAGE_3.replace(**SHORT), ["torch.bfloat16", "torch.bfloat16", True]),
    ]
    codes = [re.findall(r"```python\n(.*?)```", page_of(own, base, "USE it: 1.2x"), re.DOTALL)[0] for own, base, _ in pairs]
    command = [sys.executable, "-W", "ignore", "-c", SHARDED, str(tmp_path / "store"), json.dumps(codes)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert json.loads(told) == [expected for _, _, expected in pairs]


def test_what_is_printed_for_libraries_is_python() -> None:
    """One call each, whose arguments have the names of their documentation; compression is none of Trainer's."""
    page = page_of(PLAIN["a wire"].replace(gradient_merge=True, gradient_merge_configs={"k_steps": 4}), OWN, "USE it: 1.2x")
    calls = [ast.parse(text, mode="eval").body for text in re.findall(r"\| `(.*)` \|", page)]
    assert [call.func.id for call in calls] == ["Accelerator", "Trainer"]  # type: ignore[attr-defined]  # calls by name
    assert "kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=4.0, comm_hook=DDPCommunicationHookType.FP16)]" in page
    assert "strategy=DDPStrategy(bucket_cap_mb=4.0, ddp_comm_hook=default_hooks.fp16_compress_hook), accumulate_grad_batches=4" in page
    assert "the first 3 of them inside `model.no_sync()`" in page
    page = page_of(PLAIN["buffers"], OWN, "USE it: 1.2x")
    assert "TrainingArguments(ddp_find_unused_parameters=True, ddp_broadcast_buffers=False)" in page


@pytest.mark.parametrize(
    ("strategy", "others"),
    [
        (OWN.replace(localsgd=True, localsgd_configs={"k_steps": 4}), {"localsgd", "localsgd_configs.k_steps"}),
        (OWN.replace(nccl_comm_num=2), {"nccl_comm_num"}),
        (DistributedStrategy(fusion="optimal"), {"fusion", "fuse_grad_size_in_MB", "first_bucket_size_in_MB", "sync_nccl_allreduce"}),
        (
            DistributedStrategy(fuse_grad_count=20),
            {"fusion", "fuse_grad_count", "fuse_grad_size_in_MB", "first_bucket_size_in_MB", "sync_nccl_allreduce"},
        ),
        (
            OWN.replace(gradient_merge=True, gradient_merge_configs={"k_steps": 2, "avg": False}),
            {"gradient_merge", "gradient_merge_configs.k_steps", "gradient_merge_configs.avg"},
        ),
        (OWN.replace(thread_num=2, lr_scale=2.0), set()),
    ],
)
def test_what_pytorch_has_not_is_said(strategy: DistributedStrategy, others: set[str]) -> None:
    """By name, with the command that applies it to the script as it is; nothing is left out of the page."""
    plain, page = in_pytorch(strategy, OWN), page_of(strategy, OWN, "USE it: 1.2x")
    assert {*plain.others} == others
    assert ("no setting for" in page) is bool(others)
    assert "fleetbench launch --strategy recommended.toml -- torchrun" in page
    if not others:
        assert "`OMP_NUM_THREADS=2`" in page
        assert "times 2" in page


def test_a_recommendation_has_the_page(tmp_path: Path) -> None:
    """Beside ``recommended.toml``, if there is something to use."""
    arms = (Arm(name="default", strategy=OWN, simulated_s=0.1),)
    found = Recommendation(
        experiment="0123abcd", name="x", verdict="USE", reason="faster", strategy=PLAIN["caps"], arms=arms, speedup=1.2, low=1.1, high=1.3
    )
    found.save(tmp_path)
    assert "DistributedDataParallel(model, bucket_cap_mb=0.5)" in (tmp_path / "recommended.md").read_text()


@pytest.mark.parametrize(
    ("library", "text", "spelled"),
    [
        ("", "DistributedDataParallel(..., bucket_cap_mb=5)", "DistributedDataParallel(..., bucket_cap_mb=5)"),
        ("Trainer", "DistributedDataParallel(..., bucket_cap_mb=5)", "TrainingArguments(..., ddp_bucket_cap_mb=5)"),
        (
            "Trainer",
            "DataLoader(..., num_workers=2, persistent_workers=True)",
            "TrainingArguments(..., dataloader_num_workers=2, dataloader_persistent_workers=True)",
        ),
        (
            "Accelerate",
            "DistributedDataParallel(..., broadcast_buffers=False)",
            "Accelerator(..., kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])",
        ),
        ("Lightning", "DataLoader(..., num_workers=2)", "DataLoader(..., num_workers=2)"),
        ("fleet", "DistributedDataParallel(..., broadcast_buffers=False)", "DistributedStrategy(..., broadcast_buffers=False)"),
        ("Lightning", "OMP_NUM_THREADS=1", "OMP_NUM_THREADS=1"),
    ],
)
def test_a_remedy_is_spelled_as_the_library_takes_it(library: Library, text: str, spelled: str) -> None:
    """What no library has an argument for stays PyTorch's."""
    assert in_words_of(library, text) == spelled
