"""Probes of checkpoints that do not fit into memory: one block of weights is in place at a time.

``model.py`` opens a checkpoint without reading its matrices, ``weight_stream.py`` puts the weights of one block in place while
the next is read, ``gradients.py`` and ``removal.py`` are the two probes over it, ``run_state.py`` what an interrupted run
leaves behind, ``forecast.py`` what a run will cost.
"""
