"""Names, presets and parameters of the deployments: what is shipped is what the flows take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_core.loss import resolve_gamma
from flows.config import ExtractConfig, TrainConfig, load_config
from flows.evaluate import EvaluateConfig
from flows.prefect_plugin import NAMES, full_names

ROOT = Path(__file__).parent.parent.parent
PRESETS = sorted((ROOT / "configs").glob("*/*.yaml"))
RUN = ["prefect", "deployment", "run"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([*RUN, "train-drafter"], [*RUN, "train-drafter/train-drafter"]),
        ([*RUN, "--watch", "train-drafter"], [*RUN, "--watch", "train-drafter/train-drafter"]),
        (
            ["/venv/bin/prefect", "deployment", "inspect", "extract-hidden-states"],
            ["/venv/bin/prefect", "deployment", "inspect", "extract-hidden-states/extract-hidden-states"],
        ),
        ([*RUN, "train-drafter/train-drafter"], None),
        ([*RUN, "another"], None),
        ([*RUN, "another/other", "--tag", "train-drafter"], None),
        (["prefect", "deployment", "delete", "train-drafter"], None),
        (["prefect", "deployment"], None),
        (["prefect", "flow", "ls"], None),
        (["pytest", "deployment", "run", "train-drafter"], None),
    ],
)
def test_bare_names_are_doubled_where_prefect_needs_it(before: list[str], after: list[str] | None) -> None:
    assert full_names(before) == (before if after is None else after)


def deployments() -> dict[str, dict[str, Any]]:
    described = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    return {deployment["name"]: deployment for deployment in described["deployments"]}


def test_flows_and_deployments_carry_the_names_that_the_plugin_knows() -> None:
    from flows.build import build_compile_cache
    from flows.extract import extract_hidden_states
    from flows.extract_shards import CHILD_DEPLOYMENT, extract_shards
    from flows.train import train_drafter

    ours = (extract_hidden_states, extract_shards, build_compile_cache, train_drafter)
    flows = {flow.name: flow for flow in ours}
    assert set(flows) == set(deployments()) == NAMES | {"extract-shards"}
    assert CHILD_DEPLOYMENT == "extract-shards/extract-shards"
    for name, deployment in deployments().items():
        module, _, function = deployment["entrypoint"].rpartition(".")
        fn = flows[name].fn
        assert (fn.__module__, fn.__name__) == (module, function)
        assert deployment["pull"] == []


def test_the_deployments_default_to_the_demo() -> None:
    for name, kind, file in (
        ("extract-hidden-states", ExtractConfig, "extract.yaml"),
        ("train-drafter", TrainConfig, "train.yaml"),
        ("build-compile-cache", TrainConfig, "train.yaml"),
    ):
        given = kind.model_validate(deployments()[name]["parameters"]["config"])
        assert given == load_config(kind, ROOT / "configs/demo" / file)


def test_the_forms_of_the_ui_explain_every_field() -> None:
    from flows.build import build_compile_cache
    from flows.extract import extract_hidden_states
    from flows.train import train_drafter

    for flow in (extract_hidden_states, build_compile_cache, train_drafter):
        schema = flow.parameters.model_dump()
        assert all(field.get("description") for field in schema["properties"].values()), schema["properties"]
        silent = [
            f"{name}.{field}"
            for name, definition in schema["definitions"].items()
            for field, values in definition.get("properties", {}).items()
            if "description" not in values
        ]
        ours = [name for name in silent if name.startswith(("ExtractConfig", "TrainConfig", "WorkersConfig"))]
        assert not ours, ours


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_presets_are_whole(path: Path) -> None:
    if path.stem == "train":
        config = load_config(TrainConfig, path)
        assert resolve_gamma(config.training.loss, config.drafter.block_size) > 0
        rows = config.training.rows_per_step
        assert rows % max(1, len(config.gpus)) == 0, "a rank would wait for the others"
        extraction = load_config(ExtractConfig, path.with_name("extract.yaml"))
        assert config.dataset == extraction.store and config.target == extraction.target.path
    elif path.stem == "evaluate":
        config = load_config(EvaluateConfig, path)
        training = load_config(TrainConfig, path.with_name("train.yaml"))
        assert (config.target, str(config.drafter)) == (training.target, f"{training.output}/drafter")
    else:
        load_config(ExtractConfig, path)


def test_there_are_presets() -> None:
    assert {path.parent.name for path in PRESETS} == {"demo", "qwen3-8b", "qwen3.6-27b"}
