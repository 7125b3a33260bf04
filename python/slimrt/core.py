"""The compiled core: the one door to it. The rest of the package imports this module, never slimrt._core."""

from slimrt._core import Engine as Engine
from slimrt._core import GgufFile as GgufFile
from slimrt._core import Sampler as Sampler
from slimrt._core import __version__ as __version__
from slimrt._core import architectures as architectures
from slimrt._core import available_memory as available_memory
from slimrt._core import cache_modes as cache_modes
from slimrt._core import cpu_info as cpu_info
from slimrt._core import cuda_devices as cuda_devices
from slimrt._core import ops as ops
from slimrt._core import plan as plan
from slimrt._core import quantize as quantize
from slimrt._core import read_bandwidth as read_bandwidth
