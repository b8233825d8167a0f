"""Check anybody's training code against one device: record a few steps of two runs, merge what their ranks hold, and compare."""
