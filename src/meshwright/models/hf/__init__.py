"""Folders of Hugging Face Transformers, read and written tensor by tensor, so that no rank holds a whole model.

safetensors_file  the file format: header, slices of tensors, streamed writing
quantised         fp8 blocks (DeepSeek-V3) and MXFP4 (gpt-oss) as tensors of plain numbers
folder            a folder with one or many files: names → tensors
tables            one table per family: their names ↔ our names, as data
places            where the values of each of our parameters are in their tensors
weights           boxes of our parameters, read from a folder; what is missing, extra or of another shape
export            a folder that Transformers loads: files, index, config, tokenizer
"""
