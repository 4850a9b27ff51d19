"""Figures: each module measures into a frame, then draws the frame."""
