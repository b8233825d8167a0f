"""The version of Meshwright, which checkpoints name."""

VERSION = "0.1.0"
