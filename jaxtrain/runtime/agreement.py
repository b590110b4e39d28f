"""What all processes of a run must have alike: settings, code, versions. With a difference they would train on, in silence."""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any

from jaxtrain.runtime import machine

# May differ: which process this is, how it is reached, and folders and devices of its host.
OWN = {"runtime.coordinator_address", "runtime.process_id", "runtime.compile_cache_dir", "runtime.local_devices"}


def facts(config) -> dict[str, Any]:
    """Settings by name, versions of packages, and the digest of this package's source."""
    settings = {f"{section}.{key}": value for section, keys in config.to_dict().items() for key, value in keys.items()}
    kept = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items() if key not in OWN}
    versions = {f"version of {name}": version for name, version in machine.versions().items()}
    return kept | versions | {"source of jaxtrain (sha256)": source_digest()}


def source_digest() -> str:
    """A digest of every module of this package."""
    root, digest = pathlib.Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
