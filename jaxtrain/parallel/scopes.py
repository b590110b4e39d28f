"""Names of the scopes (`jax.named_scope`) by which a compiled step says what an operation is for; `jaxtrain.plan` reads them.

They are in the metadata of the program, so neither the file nor the line of an operation matters. Activations have scopes of
their own names (`jaxtrain.remat.activations`), the work of a pipeline stage those of `jaxtrain.pipeline.schedule`.
"""

from __future__ import annotations

WEIGHTS = "weights"  # parameters are gathered, gradients reduced, added up and divided
OPTIMIZER = "optimizer"  # the update of weights and moments
LOSS = "loss"  # head, softmax and cross-entropy
