"""Probes of Transformers in PyTorch: models of every residual scheme, checkpoints, gradient norms."""
