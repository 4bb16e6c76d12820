/* A libnvidia-ml.so.1 for machines without a GPU. It answers what the scenario file named in TOCSIN_FAKE_NVML says;
 * README.md describes the file. One lock guards everything; a call that hangs does so without it. */
#define _GNU_SOURCE
#include "json.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define GPU_LIMIT 64
#define MIG_SLOTS 7
#define DEVICE_LIMIT 512 /* GPUs and MIG instances that one process has seen */
#define FILE_LIMIT (1 << 20)

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999,
};

/* A handle. It stays valid memory for ever, as a stale handle must not crash the program that is being tested. */
typedef struct {
    char uuid[96];
    int dead; /* was seen lost; only a new nvmlInit brings it back, as with the real library */
    int is_mig;
} Device;

typedef struct {
    const char *function;
    const Json *gpu; /* or the entry of a MIG instance, to which "defaults" do not apply */
    int is_mig;
    double at_s; /* since the start of the scenario */
} Call;

typedef struct {
    double number;
    uint64_t magnitude;
    int is_integer, is_negative, is_bool;
} Number;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Json *scenario;
static unsigned generation; /* counts the good loads */
static double started_at;
static struct stat seen;
static int init_count;
static Device devices[DEVICE_LIMIT];

/* --- the file -------------------------------------------------------------------------------------------------- */

static double clock_s(clockid_t which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static char *read_all(int file) {
    char *text = malloc(FILE_LIMIT + 1);
    size_t length = 0;
    ssize_t got = 1;
    while (text != NULL && length < FILE_LIMIT && got > 0) {
        got = read(file, text + length, FILE_LIMIT - length);
        if (got > 0) length += (size_t)got;
    }
    if (text != NULL) text[length] = 0;
    return text;
}

/* Takes a changed file; a broken one is told once on stderr and the last good one stays. */
static void reload(void) {
    const char *path = getenv("TOCSIN_FAKE_NVML");
    struct stat now;
    if (path == NULL || stat(path, &now) != 0 || same_file(&now, &seen)) return;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    fstat(file, &seen);
    char *text = read_all(file);
    close(file);
    if (text == NULL) return;
    char why[160];
    Json *tree = json_parse(text, why, sizeof why);
    free(text);
    if (tree != NULL && (json_get(tree, "gpus") == NULL || json_get(tree, "gpus")->type != J_ARRAY)) {
        snprintf(why, sizeof why, "\"gpus\": [...] is missing");
        json_free(tree);
        tree = NULL;
    }
    if (tree == NULL) {
        fprintf(stderr, "fake_nvml: %s: %s; the last good scenario stays\n", path, why);
        return;
    }
    json_free(scenario);
    scenario = tree;
    generation++;
    const Json *start = json_get(tree, "start");
    started_at = start != NULL && start->type == J_NUMBER ? start->number : clock_s(CLOCK_REALTIME);
}

/* --- values over time ------------------------------------------------------------------------------------------ */

static int plain(const Json *value, Number *out) {
    if (value == NULL || (value->type != J_NUMBER && value->type != J_BOOL)) return 0;
    *out = (Number){value->number, value->magnitude, value->is_integer, value->is_negative, value->type == J_BOOL};
    return 1;
}

/* [[seconds, value], ...]: the value of the last step that has begun (before the first: the first one's). */
static int stepped(const Json *steps, double at_s, int ramp, Number *out) {
    const Json *last = NULL;
    for (const Json *step = steps->child; step != NULL; step = step->next) {
        if (step->type != J_ARRAY || step->child == NULL || step->child->next == NULL) return 0;
        if (last == NULL || step->child->number <= at_s) {
            last = step;
            continue;
        }
        double from_s = last->child->number, to_s = step->child->number;
        if (!ramp || at_s <= from_s || to_s <= from_s) break;
        double from = last->child->next->number, to = step->child->next->number;
        *out = (Number){.number = from + (to - from) * (at_s - from_s) / (to_s - from_s)};
        return 1;
    }
    return last != NULL && plain(last->child->next, out);
}

static int number_of(const Json *value, double at_s, Number *out) {
    if (value != NULL && value->type == J_ARRAY) return stepped(value, at_s, 0, out);
    const Json *ramp = json_get(value, "ramp");
    if (ramp != NULL && ramp->type == J_ARRAY) return stepped(ramp, at_s, 1, out);
    return plain(value, out);
}

/* What the GPU says, else what "defaults" says; null hides a default. `group` may be NULL. */
static const Json *find(const Call *call, const char *group, const char *key) {
    const Json *owners[] = {call->gpu, json_get(scenario, "defaults")};
    for (size_t i = 0; i < (call->is_mig ? 1 : 2); i++) {
        const Json *owner = group != NULL ? json_get(owners[i], group) : owners[i];
        if (group != NULL && owner != NULL && owner->type == J_NULL) return NULL;
        const Json *value = json_get(owner, key);
        if (value != NULL) return value;
    }
    return NULL;
}

static int value_of(const Call *call, const char *key, Number *out) {
    return number_of(find(call, NULL, key), call->at_s, out) ? SUCCESS : NOT_SUPPORTED;
}

static uint64_t as_u64(const Number *n) {
    if (n->is_integer) return n->is_negative ? (uint64_t)(-(int64_t)n->magnitude) : n->magnitude;
    if (n->number < 0) return (uint64_t)(int64_t)llround(fmax(n->number, -9e18));
    return n->number < 1.8e19 ? (uint64_t)roundl((long double)n->number) : UINT64_MAX;
}

/* --- what every call does first -------------------------------------------------------------------------------- */

/* "errors" and "hangs": by the C name, with or without its _vN, else "*". */
static int override_of(const Json *table, const Call *call, Number *out) {
    if (table == NULL || table->type != J_OBJECT) return 0;
    const Json *found = json_get(table, call->function);
    char stem[96];
    snprintf(stem, sizeof stem, "%s", call->function);
    char *version = strrchr(stem, '_');
    if (found == NULL && version != NULL && version[1] == 'v') {
        *version = 0;
        found = json_get(table, stem);
    }
    if (found == NULL) found = json_get(table, "*");
    return number_of(found, call->at_s, out);
}

static int overridden(const Call *call, const char *table, Number *out) {
    return override_of(json_get(call->gpu, table), call, out) || override_of(json_get(scenario, table), call, out);
}

static const Json *gpu_at(unsigned index) {
    const Json *gpu = json_get(scenario, "gpus");
    gpu = gpu != NULL ? gpu->child : NULL;
    for (; gpu != NULL && index > 0; index--) gpu = gpu->next;
    return gpu;
}

static void uuid_of(unsigned index, char *out, size_t size) {
    const Json *uuid = json_get(gpu_at(index), "uuid");
    if (uuid != NULL && uuid->type == J_STRING) snprintf(out, size, "%s", uuid->text);
    else snprintf(out, size, "GPU-fa4e0000-0000-4000-8000-%012x", index);
}

/* "mig_instances": [{"gi": 5, "ci": 0, "uuid": ..., "memory": {...}}, null, ...], one a slot. */
static const Json *instance_at(unsigned index, unsigned slot) {
    const Json *instances = json_get(gpu_at(index), "mig_instances");
    const Json *one = instances != NULL && instances->type == J_ARRAY ? instances->child : NULL;
    for (; one != NULL && slot > 0; slot--) one = one->next;
    return one != NULL && one->type == J_OBJECT ? one : NULL;
}

static void instance_uuid(unsigned index, unsigned slot, char *out, size_t size) {
    const Json *uuid = json_get(instance_at(index, slot), "uuid");
    if (uuid != NULL && uuid->type == J_STRING) snprintf(out, size, "%s", uuid->text);
    else snprintf(out, size, "MIG-fa4e0000-0000-4000-8000-%08x%04x", index, slot);
}

/* The index of the GPU; of a MIG instance also its entry. -1: it is there no more. */
static int find_device(const Device *device, const Json **instance) {
    char uuid[sizeof device->uuid];
    for (unsigned i = 0; i < GPU_LIMIT && gpu_at(i) != NULL; i++) {
        if (device->is_mig) {
            for (unsigned slot = 0; slot < MIG_SLOTS; slot++) {
                instance_uuid(i, slot, uuid, sizeof uuid);
                *instance = instance_at(i, slot);
                if (*instance != NULL && strcmp(uuid, device->uuid) == 0) return (int)i;
            }
            continue;
        }
        uuid_of(i, uuid, sizeof uuid);
        if (strcmp(uuid, device->uuid) == 0) return (int)i;
    }
    *instance = NULL;
    return -1;
}

static int index_of(const Device *device) {
    const Json *instance = NULL;
    return find_device(device, &instance);
}

static int is_device(const Device *device) {
    for (size_t i = 0; i < DEVICE_LIMIT; i++)
        if (device == &devices[i]) return device->uuid[0] != 0;
    return 0;
}

static void write_call(const Call *call, int index) {
    const Json *path = json_get(scenario, "calls");
    if (path == NULL || path->type != J_STRING) return;
    int file = open(path->text, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) return;
    char line[128];
    int length = snprintf(line, sizeof line, "%s %d\n", call->function, index);
    if (write(file, line, (size_t)length) != length) fprintf(stderr, "fake_nvml: %s: cannot write\n", path->text);
    close(file);
}

static void set_call(Call *call, const Device *device, int index) {
    reload();
    const Json *instance = NULL;
    if (device != NULL) index = find_device(device, &instance);
    call->is_mig = device != NULL && device->is_mig;
    call->gpu = call->is_mig ? instance : index >= 0 ? gpu_at((unsigned)index) : NULL;
    call->at_s = clock_s(CLOCK_REALTIME) - started_at;
}

/* Sleeps while the scenario says so: for N seconds, or (true) until the file changes. */
static void hang(Call *call, const Device *device, int index) {
    Number wanted;
    for (set_call(call, device, index); overridden(call, "hangs", &wanted) && wanted.number > 0;) {
        double until = clock_s(CLOCK_MONOTONIC) + wanted.number;
        unsigned before = generation;
        while (generation == before && (wanted.is_bool || clock_s(CLOCK_MONOTONIC) < until)) {
            pthread_mutex_unlock(&lock);
            nanosleep(&(struct timespec){0, 5000000}, NULL);
            pthread_mutex_lock(&lock);
            reload();
        }
        set_call(call, device, index);
        if (generation == before) return;
    }
}

static int check(Call *call, int index) {
    Number code;
    write_call(call, index);
    if (overridden(call, "errors", &code) && code.number != 0) return (int)code.number;
    return SUCCESS;
}

/* Returns with the lock held, whatever it returns. */
static int enter(Call *call, const char *function) {
    *call = (Call){.function = function};
    pthread_mutex_lock(&lock);
    hang(call, NULL, -1);
    return check(call, -1);
}

static int enter_device(Call *call, const char *function, Device *device) {
    *call = (Call){.function = function};
    pthread_mutex_lock(&lock);
    reload();
    if (init_count == 0) return UNINITIALIZED;
    if (!is_device(device)) return INVALID_ARGUMENT;
    hang(call, device, index_of(device));
    int code = check(call, index_of(device));
    int index = index_of(device);
    if (index < 0 && device->is_mig) return INVALID_ARGUMENT; /* it was destroyed */
    Call whole = {.function = function, .gpu = index >= 0 ? gpu_at((unsigned)index) : NULL, .at_s = call->at_s};
    Number lost;
    if (index < 0 || (value_of(&whole, "lost", &lost) == SUCCESS && lost.number != 0)) device->dead = 1;
    return device->dead ? GPU_IS_LOST : code;
}

static int leave(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

/* --- the library ----------------------------------------------------------------------------------------------- */

static int init(const char *function) {
    Call call;
    int code = enter(&call, function);
    if (scenario == NULL) {
        fprintf(stderr, "fake_nvml: TOCSIN_FAKE_NVML names no readable scenario: no driver\n");
        code = DRIVER_NOT_LOADED;
    }
    if (code == SUCCESS && init_count++ == 0)
        for (size_t i = 0; i < DEVICE_LIMIT; i++) devices[i].dead = 0;
    return leave(code);
}

API int nvmlInit_v2(void) { return init("nvmlInit_v2"); }

API int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return init("nvmlInitWithFlags");
}

API int nvmlShutdown(void) {
    Call call;
    int code = enter(&call, "nvmlShutdown");
    if (code == SUCCESS && init_count == 0) code = UNINITIALIZED;
    if (code == SUCCESS) init_count--;
    return leave(code);
}

API const char *nvmlErrorString(int code) {
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case NOT_SUPPORTED: return "Not Supported";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

static int put_text(const char *text, char *out, unsigned size) {
    if (out == NULL) return INVALID_ARGUMENT;
    if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
    memcpy(out, text, strlen(text) + 1);
    return SUCCESS;
}

API int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    Call call;
    int code = enter(&call, "nvmlSystemGetDriverVersion");
    if (code == SUCCESS && init_count == 0) code = UNINITIALIZED;
    const Json *driver = json_get(scenario, "driver");
    const char *text = driver != NULL && driver->type == J_STRING ? driver->text : "570.00.fake";
    return leave(code == SUCCESS ? put_text(text, out, size) : code);
}

API int nvmlDeviceGetCount_v2(unsigned *out) {
    Call call;
    int code = enter(&call, "nvmlDeviceGetCount_v2");
    if (code == SUCCESS && init_count == 0) code = UNINITIALIZED;
    if (code == SUCCESS && out == NULL) code = INVALID_ARGUMENT;
    if (code == SUCCESS)
        for (*out = 0; *out < GPU_LIMIT && gpu_at(*out) != NULL;) ++*out;
    return leave(code);
}

static int open_device(const char *uuid, int is_mig, Device **out) {
    for (size_t i = 0; i < DEVICE_LIMIT; i++) {
        if (devices[i].uuid[0] != 0 && strcmp(devices[i].uuid, uuid) != 0) continue;
        if (devices[i].dead) return GPU_IS_LOST;
        snprintf(devices[i].uuid, sizeof devices[i].uuid, "%s", uuid);
        devices[i].is_mig = is_mig;
        *out = &devices[i];
        return SUCCESS;
    }
    return UNKNOWN; /* more than DEVICE_LIMIT in one process */
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    Call call = {.function = "nvmlDeviceGetHandleByIndex_v2"};
    pthread_mutex_lock(&lock);
    reload();
    if (init_count == 0) return leave(UNINITIALIZED);
    if (index >= GPU_LIMIT || gpu_at(index) == NULL || out == NULL) return leave(INVALID_ARGUMENT);
    hang(&call, NULL, (int)index);
    int code = check(&call, (int)index);
    Number lost;
    if (call.gpu == NULL || (value_of(&call, "lost", &lost) == SUCCESS && lost.number != 0)) code = GPU_IS_LOST;
    char uuid[sizeof devices[0].uuid];
    uuid_of(index, uuid, sizeof uuid);
    return leave(code == SUCCESS ? open_device(uuid, 0, out) : code);
}

API int nvmlDeviceGetUUID(Device *device, char *out, unsigned size) {
    Call call;
    int code = enter_device(&call, "nvmlDeviceGetUUID", device);
    return leave(code == SUCCESS ? put_text(device->uuid, out, size) : code);
}

API int nvmlDeviceGetName(Device *device, char *out, unsigned size) {
    Call call;
    int code = enter_device(&call, "nvmlDeviceGetName", device);
    const Json *name = find(&call, NULL, "name");
    const char *text = name != NULL && name->type == J_STRING ? name->text : "NVIDIA H100 80GB HBM3";
    return leave(code == SUCCESS ? put_text(text, out, size) : code);
}

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} PciInfo;

API int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *out) {
    Call call;
    int code = enter_device(&call, "nvmlDeviceGetPciInfo_v3", device);
    if (code != SUCCESS) return leave(code);
    if (out == NULL) return leave(INVALID_ARGUMENT);
    memset(out, 0, sizeof *out);
    const Json *pci = json_get(call.gpu, "pci");
    if (pci == NULL || pci->type != J_STRING || sscanf(pci->text, "%x:%x:%x", &out->domain, &out->bus, &out->device) != 3)
        *out = (PciInfo){.bus = 0x1bu + (unsigned)index_of(device)};
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus & 0xff, out->device & 0xff);
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0xff);
    return leave(SUCCESS);
}

/* Most calls write one unsigned number; `scale` turns the scenario's unit into NVML's. */
static int one_u32(const char *function, Device *device, const char *key, double scale, unsigned *out) {
    Call call;
    Number value;
    int code = enter_device(&call, function, device);
    if (code == SUCCESS) code = out == NULL ? INVALID_ARGUMENT : value_of(&call, key, &value);
    if (code == SUCCESS && scale != 1.0) value = (Number){.number = value.number * scale};
    if (code == SUCCESS) *out = (unsigned)as_u64(&value);
    return leave(code);
}

API int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *out) {
    return sensor != 0 ? INVALID_ARGUMENT : one_u32("nvmlDeviceGetTemperature", device, "temperature", 1, out);
}

typedef struct {
    unsigned version, sensor;
    int temperature;
} TemperatureV1;

API int nvmlDeviceGetTemperatureV(Device *device, TemperatureV1 *out) {
    if (out == NULL || out->sensor != 0) return INVALID_ARGUMENT;
    if (out->version != 0x100000Cu) return ARGUMENT_VERSION_MISMATCH;
    return one_u32("nvmlDeviceGetTemperatureV", device, "temperature", 1, (unsigned *)&out->temperature);
}

typedef struct {
    unsigned version;
    int margin;
} MarginV1;

API int nvmlDeviceGetMarginTemperature(Device *device, MarginV1 *out) {
    if (out == NULL) return INVALID_ARGUMENT;
    if (out->version != 0x1000008u) return ARGUMENT_VERSION_MISMATCH;
    return one_u32("nvmlDeviceGetMarginTemperature", device, "margin", 1, (unsigned *)&out->margin);
}

API int nvmlDeviceGetTemperatureThreshold(Device *device, unsigned which, unsigned *out) {
    static const char *const keys[] = {"shutdown", "slowdown", "memory_max", "gpu_max"};
    if (which >= sizeof keys / sizeof *keys) return INVALID_ARGUMENT;
    return one_u32("nvmlDeviceGetTemperatureThreshold", device, keys[which], 1, out);
}

typedef struct {
    unsigned gpu, memory;
} Utilization;

API int nvmlDeviceGetUtilizationRates(Device *device, Utilization *out) {
    if (out == NULL) return INVALID_ARGUMENT;
    out->memory = 0;
    return one_u32("nvmlDeviceGetUtilizationRates", device, "utilization", 1, &out->gpu);
}

API int nvmlDeviceGetClockInfo(Device *device, unsigned clock, unsigned *out) {
    return one_u32("nvmlDeviceGetClockInfo", device, clock == 1 ? "sm_clock" : "?", 1, out);
}

API int nvmlDeviceGetMaxClockInfo(Device *device, unsigned clock, unsigned *out) {
    return one_u32("nvmlDeviceGetMaxClockInfo", device, clock == 1 ? "sm_clock_max" : "?", 1, out);
}

API int nvmlDeviceGetPowerUsage(Device *device, unsigned *out) {
    return one_u32("nvmlDeviceGetPowerUsage", device, "power_w", 1000, out);
}

API int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned *out) {
    return one_u32("nvmlDeviceGetEnforcedPowerLimit", device, "power_limit_w", 1000, out);
}

API int nvmlDeviceGetPowerManagementLimit(Device *device, unsigned *out) {
    return one_u32("nvmlDeviceGetPowerManagementLimit", device, "power_limit_w", 1000, out);
}

API int nvmlDeviceGetPowerManagementLimitConstraints(Device *device, unsigned *least, unsigned *most) {
    if (most == NULL) return INVALID_ARGUMENT;
    int code = one_u32("nvmlDeviceGetPowerManagementLimitConstraints", device, "power_least_w", 1000, least);
    if (code == SUCCESS) code = one_u32("nvmlDeviceGetPowerManagementLimitConstraints", device, "power_most_w", 1000, most);
    return code;
}

API int nvmlDeviceGetMinorNumber(Device *device, unsigned *out) {
    return one_u32("nvmlDeviceGetMinorNumber", device, "minor", 1, out);
}

API int nvmlDeviceGetCurrPcieLinkGeneration(Device *device, unsigned *out) {
    return one_u32("nvmlDeviceGetCurrPcieLinkGeneration", device, "pcie_gen", 1, out);
}

API int nvmlDeviceGetMaxPcieLinkGeneration(Device *device, unsigned *out) {
    return one_u32("nvmlDeviceGetMaxPcieLinkGeneration", device, "pcie_gen_max", 1, out);
}

API int nvmlDeviceGetCurrPcieLinkWidth(Device *device, unsigned *out) {
    return one_u32("nvmlDeviceGetCurrPcieLinkWidth", device, "pcie_width", 1, out);
}

API int nvmlDeviceGetMaxPcieLinkWidth(Device *device, unsigned *out) {
    return one_u32("nvmlDeviceGetMaxPcieLinkWidth", device, "pcie_width_max", 1, out);
}

API int nvmlDeviceGetPersistenceMode(Device *device, unsigned *out) {
    return one_u32("nvmlDeviceGetPersistenceMode", device, "persistence", 1, out);
}

static int one_u64(const char *function, Device *device, const char *key, uint64_t *out) {
    Call call;
    Number value;
    int code = enter_device(&call, function, device);
    if (code == SUCCESS) code = out == NULL ? INVALID_ARGUMENT : value_of(&call, key, &value);
    if (code == SUCCESS) *out = as_u64(&value);
    return leave(code);
}

API int nvmlDeviceGetTotalEnergyConsumption(Device *device, uint64_t *out) {
    return one_u64("nvmlDeviceGetTotalEnergyConsumption", device, "energy_mj", out);
}

API int nvmlDeviceGetCurrentClocksEventReasons(Device *device, uint64_t *out) {
    return one_u64("nvmlDeviceGetCurrentClocksEventReasons", device, "throttle", out);
}

API int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, uint64_t *out) {
    return one_u64("nvmlDeviceGetCurrentClocksThrottleReasons", device, "throttle", out);
}

typedef struct {
    uint64_t reference_time, violation_time;
} ViolationTime;

API int nvmlDeviceGetViolationStatus(Device *device, unsigned policy, ViolationTime *out) {
    if (out == NULL || policy > 1) return out == NULL ? INVALID_ARGUMENT : NOT_SUPPORTED;
    out->reference_time = 0;
    return one_u64("nvmlDeviceGetViolationStatus", device, policy == 0 ? "power_ns" : "thermal_ns", &out->violation_time);
}

typedef struct {
    uint64_t total, reserved, free, used;
} Memory;

static int memory_of(const char *function, Device *device, Memory *out) {
    Call call;
    Number value;
    *out = (Memory){0};
    int code = enter_device(&call, function, device);
    if (code != SUCCESS) return leave(code);
    if (!number_of(find(&call, "memory", "total"), call.at_s, &value)) return leave(NOT_SUPPORTED);
    out->total = as_u64(&value);
    if (number_of(find(&call, "memory", "reserved"), call.at_s, &value)) out->reserved = as_u64(&value);
    if (number_of(find(&call, "memory", "used"), call.at_s, &value)) out->used = as_u64(&value);
    out->free = out->total - out->reserved - out->used;
    if (number_of(find(&call, "memory", "free"), call.at_s, &value)) out->free = as_u64(&value);
    return leave(SUCCESS);
}

API int nvmlDeviceGetMemoryInfo(Device *device, uint64_t out[3]) {
    Memory memory;
    if (out == NULL) return INVALID_ARGUMENT;
    int code = memory_of("nvmlDeviceGetMemoryInfo", device, &memory);
    out[0] = memory.total;
    out[1] = memory.free;
    out[2] = memory.used + memory.reserved; /* the first version counts what the driver keeps as used */
    return code;
}

typedef struct {
    unsigned version;
    Memory memory;
} MemoryV2;

API int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *out) {
    if (out == NULL) return INVALID_ARGUMENT;
    if (out->version != 0x2000028u) return ARGUMENT_VERSION_MISMATCH;
    return memory_of("nvmlDeviceGetMemoryInfo_v2", device, &out->memory);
}

/* "processes", "graphics_processes": {"4242": bytes}: who computes, who draws, and what each holds. */
typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} ProcessInfo;

static int processes_of(const char *function, Device *device, const char *key, unsigned *count, ProcessInfo *out) {
    Call call;
    int code = enter_device(&call, function, device);
    if (code == SUCCESS && count == NULL) code = INVALID_ARGUMENT;
    if (code != SUCCESS) return leave(code);
    const Json *told = find(&call, NULL, key);
    if (told == NULL || told->type != J_OBJECT) return leave(NOT_SUPPORTED);
    const Json *all = told->child;
    unsigned found = 0, room = out != NULL ? *count : 0;
    for (const Json *one = all; one != NULL; one = one->next) {
        Number used;
        if (!number_of(one, call.at_s, &used) || used.number <= 0) continue; /* it has let go of it */
        if (found < room) out[found] = (ProcessInfo){(unsigned)strtoul(one->key, NULL, 10), as_u64(&used), ~0u, ~0u};
        found++;
    }
    *count = found;
    return leave(found > room ? INSUFFICIENT_SIZE : SUCCESS);
}

API int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, ProcessInfo *out) {
    return processes_of("nvmlDeviceGetComputeRunningProcesses_v3", device, "processes", count, out);
}

API int nvmlDeviceGetComputeRunningProcesses_v2(Device *device, unsigned *count, ProcessInfo *out) {
    return processes_of("nvmlDeviceGetComputeRunningProcesses_v2", device, "processes", count, out);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *device, unsigned *count, ProcessInfo *out) {
    return processes_of("nvmlDeviceGetGraphicsRunningProcesses_v3", device, "graphics_processes", count, out);
}

/* --- field values ---------------------------------------------------------------------------------------------- */

enum { DOUBLE = 0, UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3, SIGNED_LONG_LONG = 4, SIGNED_INT = 5 };

typedef struct {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    unsigned type;
    int code;
    union {
        double real;
        uint32_t u32;
        uint64_t u64;
        int32_t i32;
        int64_t i64;
    } value;
} FieldValue;

static const struct {
    uint32_t field;
    const char *key;
    double scale;
    unsigned type;
} FIELDS[] = {
    {3, "ecc_corrected", 1, UNSIGNED_LONG_LONG},
    {4, "ecc_uncorrected", 1, UNSIGNED_LONG_LONG},
    {5, "ecc_corrected_ever", 1, UNSIGNED_LONG_LONG},
    {6, "ecc_uncorrected_ever", 1, UNSIGNED_LONG_LONG},
    {29, "retired_corrected", 1, UNSIGNED_LONG_LONG},
    {30, "retired_uncorrected", 1, UNSIGNED_LONG_LONG},
    {31, "retired_pending", 1, UNSIGNED_LONG_LONG},
    {38, "nvlink_crc_flit", 1, UNSIGNED_LONG_LONG},
    {45, "nvlink_crc_data", 1, UNSIGNED_LONG_LONG},
    {52, "nvlink_replays", 1, UNSIGNED_LONG_LONG},
    {59, "nvlink_recoveries", 1, UNSIGNED_LONG_LONG},
    {74, "power_ns", 1, UNSIGNED_LONG_LONG},
    {75, "thermal_ns", 1, UNSIGNED_LONG_LONG},
    {82, "memory_temperature", 1, UNSIGNED_INT},
    {94, "pcie_replays", 1, UNSIGNED_INT},
    {185, "power_w", 1000, UNSIGNED_INT},
    {186, "power_w", 1000, UNSIGNED_INT},
    {190, "power_limit_w", 1000, UNSIGNED_INT},
    {194, "slowdown_tlimit", 1, SIGNED_INT},
    {215, "nvlink5_recoveries", 1, UNSIGNED_LONG_LONG},
    {230, "recovery_action", 1, UNSIGNED_INT},
};

static unsigned type_of(const Number *n, const Json *told) {
    static const struct { const char *name; unsigned type; } types[] = {
        {"double", DOUBLE}, {"uint", UNSIGNED_INT}, {"ull", UNSIGNED_LONG_LONG}, {"sll", SIGNED_LONG_LONG}, {"int", SIGNED_INT}};
    for (size_t i = 0; told != NULL && told->type == J_STRING && i < sizeof types / sizeof *types; i++)
        if (strcmp(told->text, types[i].name) == 0) return types[i].type;
    if (!n->is_integer) return DOUBLE;
    if (n->is_negative) return SIGNED_INT;
    return n->magnitude <= UINT32_MAX ? UNSIGNED_INT : UNSIGNED_LONG_LONG;
}

static void put_field(FieldValue *out, unsigned type, const Number *n) {
    out->type = type;
    out->code = SUCCESS;
    out->value.u64 = 0;
    if (type == DOUBLE) out->value.real = n->number;
    else if (type == UNSIGNED_INT || type == SIGNED_INT) out->value.u32 = (uint32_t)as_u64(n);
    else out->value.u64 = as_u64(n);
}

static void answer_field(const Call *call, FieldValue *out) {
    char id[16];
    Number n;
    snprintf(id, sizeof id, "%u", out->field);
    out->code = NOT_SUPPORTED;
    out->timestamp_us = (int64_t)(clock_s(CLOCK_REALTIME) * 1e6);
    out->latency_us = 0;
    if (out->field == 215 && out->scope != UINT32_MAX) return; /* it is counted by link; this is how to ask for all */
    const Json *told = find(call, "fields", id);
    if (told != NULL) {
        if (number_of(json_get(told, "error"), call->at_s, &n) && n.number != 0) out->code = (int)n.number;
        else if (number_of(json_get(told, "value"), call->at_s, &n) || number_of(told, call->at_s, &n))
            put_field(out, type_of(&n, json_get(told, "type")), &n);
        return;
    }
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++) {
        if (FIELDS[i].field != out->field || value_of(call, FIELDS[i].key, &n) != SUCCESS) continue;
        if (FIELDS[i].scale != 1) n = (Number){.number = n.number * FIELDS[i].scale};
        put_field(out, FIELDS[i].type, &n);
    }
}

API int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values) {
    Call call;
    int code = enter_device(&call, "nvmlDeviceGetFieldValues", device);
    if (code == SUCCESS && (count < 0 || values == NULL)) code = INVALID_ARGUMENT;
    const Json *alone = find(&call, NULL, "fields_one_by_one");
    if (code == SUCCESS && count > 1 && alone != NULL && alone->number != 0) code = INVALID_ARGUMENT;
    for (int i = 0; code == SUCCESS && i < count; i++) answer_field(&call, &values[i]);
    return leave(code);
}

/* --- the state of the hardware --------------------------------------------------------------------------------- */

API int nvmlDeviceGetRemappedRows(Device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                                  unsigned *failed) {
    static const char *const keys[] = {"correctable", "uncorrectable", "pending", "failure"};
    unsigned *out[] = {corrected, uncorrected, pending, failed};
    Call call;
    Number value;
    int code = enter_device(&call, "nvmlDeviceGetRemappedRows", device);
    for (size_t i = 0; code == SUCCESS && i < 4; i++) {
        if (out[i] == NULL) code = INVALID_ARGUMENT;
        else if (!number_of(find(&call, "remapped", keys[i]), call.at_s, &value)) code = NOT_SUPPORTED;
        else *out[i] = (unsigned)as_u64(&value);
    }
    return leave(code);
}

typedef struct {
    unsigned max, high, partial, low, none;
} Histogram;

API int nvmlDeviceGetRowRemapperHistogram(Device *device, Histogram *out) {
    Call call;
    Number value;
    int code = enter_device(&call, "nvmlDeviceGetRowRemapperHistogram", device);
    if (code == SUCCESS && out == NULL) code = INVALID_ARGUMENT;
    if (code == SUCCESS && !number_of(find(&call, "remapped", "exhausted"), call.at_s, &value)) code = NOT_SUPPORTED;
    if (code == SUCCESS) *out = (Histogram){.max = 640 - (unsigned)as_u64(&value), .none = (unsigned)as_u64(&value)};
    return leave(code);
}

/* "nvlinks": a bit mask of the links that are up; "nvlink_count": how many there are (18). */
API int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *out) {
    Call call;
    Number mask, count;
    int code = enter_device(&call, "nvmlDeviceGetNvLinkState", device);
    if (code == SUCCESS) code = out == NULL ? INVALID_ARGUMENT : value_of(&call, "nvlinks", &mask);
    if (code == SUCCESS && link >= (value_of(&call, "nvlink_count", &count) == SUCCESS ? as_u64(&count) : 18))
        code = INVALID_ARGUMENT;
    if (code == SUCCESS) *out = (unsigned)(as_u64(&mask) >> link & 1);
    return leave(code);
}

API int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    if (current == NULL || pending == NULL) return INVALID_ARGUMENT;
    int code = one_u32("nvmlDeviceGetMigMode", device, "mig", 1, current);
    *pending = *current;
    return code;
}

/* On the handle of a MIG instance what its own entry does not name is NOT_SUPPORTED, as with the real library. */
API int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *out) {
    Call call;
    Number mode;
    int code = enter_device(&call, "nvmlDeviceGetMaxMigDeviceCount", device);
    if (code == SUCCESS) code = out == NULL || device->is_mig ? INVALID_ARGUMENT : value_of(&call, "mig", &mode);
    if (code == SUCCESS) *out = MIG_SLOTS;
    return leave(code);
}

API int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned slot, Device **out) {
    Call call;
    Number mode;
    int code = enter_device(&call, "nvmlDeviceGetMigDeviceHandleByIndex", device);
    if (code == SUCCESS) code = out == NULL || device->is_mig || slot >= MIG_SLOTS ? INVALID_ARGUMENT : SUCCESS;
    if (code == SUCCESS) code = value_of(&call, "mig", &mode);
    if (code != SUCCESS) return leave(code);
    if (mode.number == 0 || instance_at((unsigned)index_of(device), slot) == NULL) return leave(NOT_FOUND);
    char uuid[sizeof devices[0].uuid];
    instance_uuid((unsigned)index_of(device), slot, uuid, sizeof uuid);
    return leave(open_device(uuid, 1, out));
}

static int instance_id(const char *function, Device *device, const char *key, unsigned *out) {
    Call call;
    Number id;
    int code = enter_device(&call, function, device);
    if (code == SUCCESS) code = out == NULL ? INVALID_ARGUMENT : device->is_mig ? value_of(&call, key, &id) : NOT_SUPPORTED;
    if (code == SUCCESS) *out = (unsigned)as_u64(&id);
    return leave(code);
}

API int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *out) {
    return instance_id("nvmlDeviceGetGpuInstanceId", device, "gi", out);
}

API int nvmlDeviceGetComputeInstanceId(Device *device, unsigned *out) {
    return instance_id("nvmlDeviceGetComputeInstanceId", device, "ci", out);
}

typedef struct {
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
} FabricInfo;

API int nvmlDeviceGetGpuFabricInfo(Device *device, FabricInfo *out) {
    Call call;
    Number state, status;
    int code = enter_device(&call, "nvmlDeviceGetGpuFabricInfo", device);
    if (code == SUCCESS) code = out == NULL ? INVALID_ARGUMENT : value_of(&call, "fabric_state", &state);
    if (code != SUCCESS) return leave(code);
    memset(out, 0, sizeof *out);
    out->state = (unsigned char)as_u64(&state);
    if (value_of(&call, "fabric_status", &status) == SUCCESS) out->status = (unsigned)as_u64(&status);
    return leave(SUCCESS);
}

/* --- events ---------------------------------------------------------------------------------------------------- */

enum { TIMEOUT = 10, SET_LIMIT = 8 };

typedef struct {
    int used;
    unsigned long long registered[DEVICE_LIMIT]; /* by device */
    unsigned given[GPU_LIMIT];                /* how many of a GPU's "xids" were handed out, by its index */
    unsigned generation;
} EventSet;

static EventSet sets[SET_LIMIT];

typedef struct {
    Device *device;
    unsigned long long type, data;
    unsigned instance, compute_instance;
} EventData;

API int nvmlEventSetCreate(EventSet **out) {
    Call call;
    int code = enter(&call, "nvmlEventSetCreate");
    if (code == SUCCESS && init_count == 0) code = UNINITIALIZED;
    for (size_t i = 0; code == SUCCESS && i < SET_LIMIT; i++) {
        if (sets[i].used) continue;
        sets[i] = (EventSet){.used = 1, .generation = generation};
        *out = &sets[i];
        return leave(SUCCESS);
    }
    return leave(code == SUCCESS ? UNKNOWN : code);
}

API int nvmlEventSetFree(EventSet *set) {
    Call call;
    int code = enter(&call, "nvmlEventSetFree");
    if (set != NULL) set->used = 0;
    return leave(code);
}

API int nvmlDeviceGetSupportedEventTypes(Device *device, uint64_t *out) {
    return one_u64("nvmlDeviceGetSupportedEventTypes", device, "event_types", out);
}

API int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
    Call call;
    Number supported;
    int code = enter_device(&call, "nvmlDeviceRegisterEvents", device);
    if (code == SUCCESS) code = value_of(&call, "event_types", &supported);
    if (code == SUCCESS && (set == NULL || !set->used)) code = INVALID_ARGUMENT;
    if (code == SUCCESS) set->registered[device - devices] |= types;
    return leave(code);
}

/* "xids": [[seconds, number, GPU instance, compute instance], ...] of a GPU: handed out once each, when their second has come. */
static int next_event(EventSet *set, EventData *out) {
    if (set->generation != generation) {
        memset(set->given, 0, sizeof set->given);
        set->generation = generation;
    }
    double at_s = clock_s(CLOCK_REALTIME) - started_at;
    for (unsigned i = 0; i < GPU_LIMIT && gpu_at(i) != NULL; i++) {
        const Json *xid = json_get(gpu_at(i), "xids");
        xid = xid != NULL ? xid->child : NULL;
        for (unsigned skip = set->given[i]; xid != NULL && skip > 0; skip--) xid = xid->next;
        if (xid == NULL || xid->child == NULL || xid->child->next == NULL || xid->child->number > at_s) continue;
        for (size_t d = 0; d < DEVICE_LIMIT; d++) {
            if (!(set->registered[d] & 8) || devices[d].is_mig || index_of(&devices[d]) != (int)i) continue;
            const Json *gi = xid->child->next->next, *ci = gi != NULL ? gi->next : NULL;
            set->given[i]++;
            *out = (EventData){&devices[d], 8, xid->child->next->magnitude,
                               gi != NULL ? (unsigned)gi->magnitude : 0xFFFFFFFFu,
                               ci != NULL ? (unsigned)ci->magnitude : 0xFFFFFFFFu};
            return SUCCESS;
        }
    }
    return TIMEOUT;
}

API int nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned timeout_ms) {
    Call call;
    double until = clock_s(CLOCK_MONOTONIC) + timeout_ms / 1000.0;
    int code = enter(&call, "nvmlEventSetWait_v2");
    while (code == SUCCESS) {
        if (init_count == 0 || set == NULL || !set->used) code = UNINITIALIZED;
        else if (next_event(set, out) == SUCCESS) return leave(SUCCESS);
        else if (clock_s(CLOCK_MONOTONIC) >= until) code = TIMEOUT;
        else {
            pthread_mutex_unlock(&lock);
            nanosleep(&(struct timespec){0, 5000000}, NULL);
            pthread_mutex_lock(&lock);
            reload();
        }
    }
    return leave(code);
}
