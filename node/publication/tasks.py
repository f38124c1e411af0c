"""Scores of a model folder in tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness).

The node and `diloco-node evaluate` call the same function on the same files, on the CPU and in fp32, so they agree.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.config.schema import EvaluateConfig
from node.errors import MachineError, UsageError
from node.host.files import expand_user
from node.training.hub import first_sentence

NOT_INSTALLED = "no_lm_eval"


def evaluate_folder(folder: Path, cfg: EvaluateConfig) -> dict[str, float]:
    """Evaluate a model folder. Returns the scores by TASK/METRIC.

    Raises MachineError without lm-eval, or if the model or a data set cannot be read, and UsageError for an unknown
    task.
    """
    if not cfg.tasks:
        raise UsageError("No task is named: write --tasks NAME,NAME, or set evaluate.tasks.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The libraries warn about what nobody here can change.
        try:
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM
            from lm_eval.tasks import TaskManager
        except ImportError as exc:
            raise MachineError(
                f"Evaluation on tasks needs a package that is not installed ({exc.name}): run "
                "`pip install 'diloco-node[eval]'` with the node's own pip.",
                code=NOT_INSTALLED,
            ) from exc
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        manager = _task_manager(TaskManager, cfg)
        try:
            model = HFLM(pretrained=str(folder.absolute()), device="cpu", dtype="float32", batch_size=1)
        except Exception as exc:
            raise MachineError(
                f"The model in {folder} cannot be loaded ({first_sentence(exc)}): write the folder again with "
                "`diloco-node export`.",
                code="model",
            ) from exc
        try:
            found = simple_evaluate(
                model,
                tasks=list(cfg.tasks),
                task_manager=manager,
                limit=cfg.limit or None,
                bootstrap_iters=0,
                log_samples=False,
            )
        except Exception as exc:
            raise MachineError(
                f"The tasks {', '.join(cfg.tasks)} could not be evaluated ({first_sentence(exc)}): check their files, "
                "their data sets and this machine's network.",
                code="tasks",
            ) from exc
    return scores_of(found["results"] if found else {})


def _task_manager(kind: Any, cfg: EvaluateConfig) -> Any:
    """The tasks of `evaluate.task_dir`, and those of lm-eval if they are needed, as their index takes a while to read.

    Raises UsageError if one of the tasks is in neither.
    """
    folder = expand_user(cfg.task_dir) if cfg.task_dir else None
    if folder is not None and not folder.is_dir():
        raise UsageError(f"evaluate.task_dir {cfg.task_dir} is not a folder: name the one with your task files.")
    own = kind(include_path=str(folder), include_defaults=False) if folder is not None else None
    if own is not None and set(cfg.tasks) <= set(own.all_tasks):
        return own
    every = kind(include_path=str(folder) if folder is not None else None)
    unknown = sorted(set(cfg.tasks) - set(every.all_tasks))
    if unknown:
        raise UsageError(
            f"lm-eval has no task {', '.join(unknown)}: `lm-eval ls tasks` lists its tasks; your own are YAML files in "
            "evaluate.task_dir."
        )
    return every


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The numbers in the results of lm-eval, without standard errors, by TASK/METRIC or TASK/METRIC,FILTER."""
    scores = {}
    for task, values in sorted(results.items()):
        for name, value in sorted(values.items()):
            metric, _, filter_ = name.partition(",")
            if not filter_ or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            if math.isfinite(value):
                scores[f"{task}/{metric}" if filter_ == "none" else f"{task}/{name}"] = float(value)
    return scores
