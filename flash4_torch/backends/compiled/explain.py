"""What FLASH4_LOG=config prints: the row of a table, the config, the plan and the launch of a problem."""

from __future__ import annotations

import importlib.util
from importlib import import_module

from ...compile.key import in_words
from ...configs.weights import KEYS, QUERIES
from ...problem import Problem
from . import backward, forward, stacks, weights
from .targets import BackwardConfig, ForwardConfig, Target


def explain(target: Target, problem: Problem, num_sms: int) -> list[str]:
    """One line each; nothing is compiled."""
    config: BackwardConfig | ForwardConfig
    problem, splits = stacks.stacked(target, problem, num_sms), ""
    if problem.spec.weights:
        own = weights.features_of_weights(forward.features_of(problem))
        return [in_words(own), f"tiles of {QUERIES} queries by {KEYS} keys"]
    if problem.spec.backward:
        config = chosen = backward.config_of(target, problem, num_sms)
        features = backward.main_features(backward.features_of(problem), chosen)
        row, entry = backward.row_of(target, problem, num_sms), target.backward
        params = backward.params_of(target, problem, chosen, num_sms)
    else:
        features, entry = forward.features_of(problem), target.forward
        split = forward.split_of(target, problem, num_sms, features)
        config = tiles = forward.config_of(target, problem, num_sms) if split is None else split.config
        row = forward.row_of(target, problem, num_sms)
        if split is not None:
            features, row, splits = features._replace(splits=True), split.row, f", {split.number} splits"
        params = forward.params_of(target, problem, tiles, num_sms)
    launch = f"heads_per_section={params.heads_per_section}, run_length={params.run_length}, {num_sms} SMs"
    stack = f", stacks of {problem.entries} entries, if these follow one another in memory"
    return [
        f"row D <= {row.D}, Dv <= {row.Dv} of {target.arch}: {row.why}",
        f"{in_words(features)}",
        f"{in_words(config)}: {config.shared_memory(features)} bytes of shared memory",
        *_plan(entry, features, config),
        f"launch: {launch}{splits}{stack if problem.entries > 1 else ''}",
    ]


def _plan(entry: str, features: object, config: object) -> list[str]:
    """Threads and registers, where the compiler is installed that the plan imports."""
    if not importlib.util.find_spec("cutlass"):
        return []
    room = entry.partition(":")[0].rpartition(".")[0]
    plan = import_module(f"{room}.plan").Plan(features, config)
    return [f"plan: {plan.threads} threads, {in_words(plan.registers)}, clusters of {plan.cluster_size}"]
