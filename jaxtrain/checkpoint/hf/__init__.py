"""Hugging Face folders: config.json and the model section, tensor names and layouts, reading and writing safetensors."""
