"""The GPUs of this machine, asked of NVIDIA's driver (extra `gpu`: nvidia-ml-py)."""

from headrace_autoscaler.gpu_inventory import Gpu


def local_gpus() -> tuple[Gpu, ...]:
    """In the driver's order, by UUID. None where there is no driver, no library, or no right to ask."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(Gpu(str(pynvml.nvmlDeviceGetUUID(handle)), index) for index, handle in enumerate(handles))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()
