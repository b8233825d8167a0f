"""The update at the end of a step: parameter groups, AdamW, SGD and Muon, the learning rate, clipping, averages, gradients that are not finite."""
