"""`data prepare`: text files to a token file, chunk by chunk, in parallel and resumable."""
