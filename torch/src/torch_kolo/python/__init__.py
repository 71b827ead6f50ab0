"""The backend in Python, on the shared library of this package. It fits every PyTorch of which a
class of Python can be a backend.
"""
