"""Searching for layouts and settings: candidates, the compiler as judge, advice, comparison."""
