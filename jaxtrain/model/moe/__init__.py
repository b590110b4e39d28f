"""Mixtures of experts: router, dispatch of tokens to experts, experts, balance."""
