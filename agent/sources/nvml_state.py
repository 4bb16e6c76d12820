"""What NVML tells of the state of one GPU's hardware: memory errors, rows, links, PCIe, fabric, the driver's verdict.

Read after nvml_values' numbers and by the same means. What a card does not tell is simply not there: a card without
NVLink has no link that could be down.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref

import pynvml

from agent.sources import nvml_values as values
from agent.sources.nvml_values import UNSUPPORTED, Field, Group, Reader, UnsupportedError, Way

MOST_LINKS = 18
NVML_TEMPERATURE_THRESHOLD_MEM_MAX = 2


def _field(name: str, field: Field, how: str) -> Group:
    return Group((name,), (Way(f"field {field.id} ({how})", lambda r: (r.field(field),)),), wide=True)


def _call(name: str, function: str, wide: bool = False) -> Group:
    return Group((name,), (Way(function, lambda r: (r.call(function),)),), wide=wide)


def _remapped(r: Reader) -> tuple[float, ...]:
    corrected, uncorrected, pending, failed = r.call("nvmlDeviceGetRemappedRows")
    return corrected, uncorrected, pending, failed


def _retired(r: Reader) -> tuple[float, ...]:
    return (r.field(values.RETIRED_CORRECTED) + r.field(values.RETIRED_UNCORRECTED),)


def _crc(r: Reader) -> tuple[float, ...]:
    return (r.field(values.NVLINK_CRC_FLIT) + r.field(values.NVLINK_CRC_DATA),)


def _nvlinks(r: Reader) -> tuple[float, ...]:
    """The links that are up as a bit mask, and how many there are."""
    mask = 0
    for link in range(MOST_LINKS):
        try:
            mask |= bool(r.call("nvmlDeviceGetNvLinkState", link)) << link
        except pynvml.NVMLError as error:
            if error.value not in UNSUPPORTED and error.value != pynvml.NVML_ERROR_INVALID_ARGUMENT:
                raise
            if link == 0:
                raise UnsupportedError from None
            return mask, link
    return mask, MOST_LINKS


def _fabric(r: Reader) -> tuple[float, ...]:
    info = pynvml.c_nvmlGpuFabricInfo_t()
    r.call("nvmlDeviceGetGpuFabricInfo", byref(info))
    state = info.state & 0xFF  # one byte in the driver's structure
    if state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        raise UnsupportedError
    return state, info.status


def _pcie(now: str, most: str) -> Callable[[Reader], tuple[float, ...]]:
    return lambda r: (r.call(now), r.call(most))


STATE: tuple[Group, ...] = (
    _field(values.RECOVERY_NAME, values.RECOVERY_ACTION, "recovery action"),
    _field("gpu_ecc_corrected", values.ECC_CORRECTED, "corrected errors since the driver was loaded"),
    _field("gpu_ecc_uncorrected", values.ECC_UNCORRECTED, "uncorrected errors since the driver was loaded"),
    _field("gpu_ecc_corrected_ever", values.ECC_CORRECTED_EVER, "corrected errors"),
    _field("gpu_ecc_uncorrected_ever", values.ECC_UNCORRECTED_EVER, "uncorrected errors"),
    Group(
        ("gpu_remapped_corrected", "gpu_remapped_uncorrected", "gpu_remap_pending", "gpu_remap_failed"),
        (Way("nvmlDeviceGetRemappedRows", _remapped),),
    ),
    Group(
        ("gpu_banks_exhausted",),
        (
            Way(
                "nvmlDeviceGetRowRemapperHistogram",
                lambda r: (r.call("nvmlDeviceGetRowRemapperHistogram").none,),
            ),
        ),
    ),
    Group(("gpu_retired",), (Way("fields 29 and 30 (retired pages)", _retired),)),
    _field("gpu_retired_pending", values.RETIRED_PENDING, "pages that wait to be retired"),
    Group(
        ("gpu_pcie_gen", "gpu_pcie_gen_max"),
        (
            Way(
                "nvmlDeviceGetCurrPcieLinkGeneration",
                _pcie("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkGeneration"),
            ),
        ),
    ),
    Group(
        ("gpu_pcie_width", "gpu_pcie_width_max"),
        (
            Way(
                "nvmlDeviceGetCurrPcieLinkWidth",
                _pcie("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkWidth"),
            ),
        ),
    ),
    _field("gpu_pcie_replays", values.PCIE_REPLAYS, "PCIe replays"),
    Group(
        ("gpu_memory_temp_c",),
        (Way("field 82 (memory temperature)", lambda r: (r.field(values.MEMORY_TEMP) or _no_sensor(),)),),
        high=200,
    ),
    Group(
        ("gpu_memory_temp_max_c",),
        (
            Way(
                "nvmlDeviceGetTemperatureThreshold(memory)",
                lambda r: (r.call("nvmlDeviceGetTemperatureThreshold", NVML_TEMPERATURE_THRESHOLD_MEM_MAX),),
            ),
        ),
        low=1,
        high=126,
    ),
    Group(("gpu_nvlink_up", "gpu_nvlink_count"), (Way("nvmlDeviceGetNvLinkState", _nvlinks),)),
    _field("gpu_nvlink_replays", values.NVLINK_REPLAYS, "NVLink replays"),
    Group(
        ("gpu_nvlink_recoveries",),
        (
            Way("field 59 (NVLink recoveries)", lambda r: (r.field(values.NVLINK_RECOVERIES),)),
            Way("field 215 (NVLink5 recoveries)", lambda r: (r.field_of_all_links(values.NVLINK5_RECOVERIES),)),
        ),
        wide=True,
    ),
    Group(("gpu_nvlink_crc",), (Way("fields 38 and 45 (NVLink CRC)", _crc),), wide=True),
    Group(("gpu_fabric", "gpu_fabric_status"), (Way("nvmlDeviceGetGpuFabricInfo", _fabric),)),
    _call("gpu_persistence", "nvmlDeviceGetPersistenceMode"),
    _call("gpu_energy_mj", "nvmlDeviceGetTotalEnergyConsumption", wide=True),
    Group(("gpu_mig",), (Way("nvmlDeviceGetMigMode", lambda r: (r.call("nvmlDeviceGetMigMode")[0],)),)),
)


def _no_sensor() -> float:
    raise UnsupportedError  # 0 °C of a memory that is in use is no temperature
