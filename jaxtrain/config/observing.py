"""Checks of the section `observe` beside others."""

from __future__ import annotations

import ml_collections


def problems(config: ml_collections.ConfigDict) -> list[str]:
    """What of it contradicts other settings."""
    steps, found = config.train.num_steps, []
    for key in ("check_nans", "activation_stats_every_steps"):
        if config.observe[key] and config.mesh.pipeline != 1:
            found.append(f"observe.{key}: not with pipeline stages, got mesh.pipeline={config.mesh.pipeline}; set 0 or False")
    if recorded := config.observe.profile_steps:
        first, last = (*map(int, recorded), 0)[:2]
        if len(recorded) != 2 or not 1 <= first <= last <= steps:
            found.append(
                f"observe.profile_steps: {','.join(recorded)} are not the first and the last step to record, from 1 to "
                f"train.num_steps={steps}; write 10,13"
            )
    return found
