"""Attention backends: a module each, with `attend`; `backend.choose` picks one. A setting that one cannot honour is refused."""
