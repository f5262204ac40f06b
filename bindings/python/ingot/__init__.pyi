from . import engine as engine, functional as functional, hf as hf, nn as nn, optim as optim

built_with_cuda: bool
__version__: str
