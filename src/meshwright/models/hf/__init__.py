"""Folders of Hugging Face Transformers, read and written tensor by tensor, so that no rank holds a whole model.

safetensors_file  the file format: header, slices of tensors, streamed writing
folder            a folder with one or many files: names → tensors; fp8 blocks (DeepSeek-V3) and MXFP4 (gpt-oss) as plain numbers
tables            one table per family: their names ↔ our names, as data; where the values of each of our parameters are in their tensors
weights           boxes of our parameters, read from a folder; and a folder that Transformers loads, written
"""
