"""What optimizers hold for each trained number. Twins of engine/optim.py, which does the arithmetic."""
