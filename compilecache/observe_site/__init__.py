"""The folder that an observed process finds first on its PYTHONPATH; nothing here is imported as a package."""
