"""Start-up hook of recorded processes: this folder is put on their PYTHONPATH."""
