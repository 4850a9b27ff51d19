"""Layer-norm Jacobian theory of residual schemes: NumPy, SciPy and (on demand) SymPy, never torch."""
