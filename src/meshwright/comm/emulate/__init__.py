"""Emulated clusters: several hosts on one Linux machine, as network namespaces joined by links of a chosen rate and delay."""
