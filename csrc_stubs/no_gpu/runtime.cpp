// A stand-in for the library through which CuTe-DSL's compiled host code reaches CUDA. It knows one device and executes
// nothing: cubins that are loaded and kernels that are launched go to the callbacks of flash4_torch/emulator/host.py,
// which mirrors `Launch`.
//
// Host code finds these functions instead of that library's because flash4_torch/emulator/dsl.py renames what it calls:
// `_cudaGetDevice` becomes `flash4_cudaGetDevice`. They return CUDA's error codes; the reason, in words, waits in
// `last_error`.
#include <elf.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <string_view>

#include "tensor_map.h"

namespace tma = flash4::tma;

namespace {

enum Error : int32_t {
    kSuccess = 0,
    kInvalidValue = 1,
    kLaunchFailure = 719,
    kNotSupported = 801,
};

struct Dim3 {
    uint32_t x = 1, y = 1, z = 1;
};

// A launch, as the callback sees it. `library` is what the load callback returned for the cubin.
struct Launch {
    const char* kernel;
    uint64_t library;
    Dim3 grid, block, cluster;
    uint64_t dynamic_shared;
    int32_t cooperative, programmatic;
    void** args;
};

using LoadCallback = uint64_t (*)(const void* cubin, uint64_t bytes);
using LaunchCallback = int32_t (*)(const Launch*);

struct Kernel {
    std::string name;
    uint64_t library;
};
struct Library {
    uint64_t id;
    std::map<std::string, Kernel> kernels;
};

struct Device {
    int32_t major = 10, minor = 0, multiprocessors = 148;
};

LoadCallback load_callback = nullptr;
LaunchCallback launch_callback = nullptr;
Device device;
thread_local std::string last_error;

Error fail(Error error, std::string reason) {
    last_error = std::move(reason);
    return error;
}

uint64_t elf_bytes(const char* elf) {
    const auto* header = reinterpret_cast<const Elf64_Ehdr*>(elf);
    const auto* sections = reinterpret_cast<const Elf64_Shdr*>(elf + header->e_shoff);
    uint64_t end = std::max<uint64_t>(header->e_shoff + uint64_t{header->e_shnum} * header->e_shentsize,
                                      header->e_phoff + uint64_t{header->e_phnum} * header->e_phentsize);
    for (unsigned i = 0; i < header->e_shnum; ++i)
        if (sections[i].sh_type != SHT_NOBITS)
            end = std::max<uint64_t>(end, sections[i].sh_offset + sections[i].sh_size);
    return end;
}

// An image is a cubin or wraps one: then it starts with 8 bytes of magic, version and header size, and 8 of the size of
// the rest. Empty if there is none, as in a compressed image.
std::string_view cubin_in(const char* image) {
    static constexpr std::string_view elf_magic{ELFMAG, SELFMAG};
    if (std::string_view(image, SELFMAG) == elf_magic) return {image, elf_bytes(image)};
    struct {
        uint32_t magic;
        uint16_t version, header_bytes;
        uint64_t bytes;
    } wrapper;
    std::memcpy(&wrapper, image, sizeof wrapper);
    if (wrapper.magic != 0xba55ed50) return {};
    const std::string_view whole(image, wrapper.header_bytes + wrapper.bytes);
    const size_t start = whole.find(elf_magic);
    if (start == whole.npos) return {};
    return {image + start, elf_bytes(image + start)};
}

// The attributes that host code and schedulers ask for, by the CUDA runtime's numbers; the values are those of an H100
// and a B200.
bool device_attribute(int32_t attribute, int32_t& value) {
    static const std::map<int32_t, int32_t> common = {
        {1, 1024},                                     // threads per block
        {2, 1024},                                     // block dimensions
        {3, 1024},       {4, 64},    {5, 0x7fffffff},  // grid dimensions
        {6, 65535},      {7, 65535}, {8, 48 << 10},    // shared memory per block without opting in
        {10, 32},                                      // warp size
        {12, 65536},                                   // registers per block
        {39, 2048},                                    // threads per multiprocessor
        {81, 228 << 10},                               // shared memory per multiprocessor
        {82, 65536},                                   // registers per multiprocessor
        {95, 1},                                       // cooperative launch
        {97, 227 << 10},                               // shared memory per block, opting in
        {106, 32},                                     // blocks per multiprocessor
        {111, 1 << 10},                                // shared memory reserved per block
        {120, 1},                                      // cluster launch
    };
    switch (attribute) {
        case 16: value = device.multiprocessors; return true;
        case 75: value = device.major; return true;
        case 76: value = device.minor; return true;
    }
    const auto found = common.find(attribute);
    if (found == common.end()) return false;
    value = found->second;
    return true;
}

// Launch attributes, laid out and numbered as in cudaLaunchAttribute.
struct Attribute {
    uint32_t id, padding;
    union {
        Dim3 dims;
        int32_t flag;
        uint8_t bytes[64];
    };
};
struct LaunchConfig {
    Dim3 grid, block;
    uint64_t dynamic_shared;
    void* stream;
    const Attribute* attributes;
    uint32_t attribute_count;
};

// Those that change what a kernel may do are passed on; those that only advise are dropped knowingly.
Error apply(const Attribute& attribute, Launch& launch) {
    switch (attribute.id) {
        case 2: launch.cooperative = attribute.flag; return kSuccess;
        case 4: launch.cluster = attribute.dims; return kSuccess;
        case 6: launch.programmatic = attribute.flag; return kSuccess;
        case 0:   // ignore
        case 1:   // access policy window
        case 5:   // cluster scheduling policy
        case 8:   // priority
        case 14:  // preferred shared memory carveout
            return kSuccess;
    }
    return fail(kNotSupported, "the emulator does not know launch attribute " + std::to_string(attribute.id));
}

// Tensor maps number element types otherwise than the driver's call; by the call's number.
constexpr uint8_t element_types[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 11, 12, 13, 14, 15};

Error launch(const Launch& launch) {
    if (!launch_callback) return fail(kLaunchFailure, "no emulator is installed");
    return static_cast<Error>(launch_callback(&launch));
}

}  // namespace

extern "C" {

// For Python.

void flash4_set_load_callback(LoadCallback callback) { load_callback = callback; }
void flash4_set_launch_callback(LaunchCallback callback) { launch_callback = callback; }
void flash4_set_error(const char* reason) { last_error = reason; }
const char* flash4_last_error() { return last_error.c_str(); }
void flash4_set_device(int32_t major, int32_t minor, int32_t multiprocessors) {
    device = {major, minor, multiprocessors};
}

// For compiled host code: libraries and kernels.

int32_t flash4_cudaLibraryLoadData(Library** library, const char* image, void*, void*, uint32_t, void*, void*,
                                   uint32_t) {
    if (!load_callback) return fail(kInvalidValue, "no emulator is installed");
    const std::string_view cubin = cubin_in(image);
    if (cubin.empty()) return fail(kInvalidValue, "a kernel image that holds no plain cubin");
    const uint64_t id = load_callback(cubin.data(), cubin.size());
    if (!id) return kInvalidValue;
    *library = new Library{id, {}};
    return kSuccess;
}

int32_t flash4_cudaLibraryGetKernel(const Kernel** kernel, Library* library, const char* name) {
    *kernel = &library->kernels.try_emplace(name, Kernel{name, library->id}).first->second;
    return kSuccess;
}

// Asked only for the static shared memory (1), to set a limit for the rest, which nothing here enforces.
int32_t flash4_cuKernelGetAttribute(int32_t* value, int32_t attribute, const Kernel*, int32_t) {
    if (attribute != 1)
        return fail(kNotSupported, "the emulator does not know kernel attribute " + std::to_string(attribute));
    *value = 0;
    return kSuccess;
}

int32_t flash4_cudaFuncSetAttribute(const Kernel*, int32_t, int32_t) { return kSuccess; }
int32_t flash4_cudaKernelSetAttributeForDevice(const Kernel*, int32_t, int32_t, int32_t) { return kSuccess; }

// The device.

int32_t flash4_cudaGetDevice(int32_t* ordinal) {
    *ordinal = 0;
    return kSuccess;
}

int32_t flash4_cudaSetDevice(int32_t ordinal) {
    if (ordinal == 0) return kSuccess;
    return fail(kInvalidValue, "the emulator has one device, not number " + std::to_string(ordinal));
}

int32_t flash4_cudaDeviceGetAttribute(int32_t* value, int32_t attribute, int32_t) {
    if (device_attribute(attribute, *value)) return kSuccess;
    return fail(kNotSupported, "the emulator does not know device attribute " + std::to_string(attribute));
}

int32_t flash4_cudaLaunchKernelEx(const LaunchConfig* config, const Kernel* kernel, void** args) {
    Launch request{
        kernel->name.c_str(), kernel->library, config->grid, config->block, {}, config->dynamic_shared, 0, 0, args};
    for (uint32_t i = 0; i < config->attribute_count; ++i)
        if (const Error error = apply(config->attributes[i], request)) return error;
    return launch(request);
}

// Tensor maps that host code does not write by itself. Sizes in elements, strides in bytes of dimension 1 and on.
int32_t flash4_cuTensorMapEncodeTiled(uint8_t* map, uint32_t type, uint32_t rank, void* address, const uint64_t* sizes,
                                      const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                                      int32_t interleave, uint32_t swizzle, int32_t, int32_t fill) {
    if (type >= std::size(element_types) || rank < 1 || rank > tma::kMaxRank)
        return fail(kInvalidValue, "a malformed tensor map");
    const bool dense = std::all_of(steps, steps + rank, [](uint32_t step) { return step == 1; });
    if (!dense || interleave || fill)
        return fail(kNotSupported, "the emulator has no tensor maps with interleave, NaN fill or element strides");
    std::memset(map, 0, tma::kMapBytes);
    tma::replace(map, tma::Field::Address, 0, reinterpret_cast<uint64_t>(address));
    tma::replace(map, tma::Field::Rank, 0, rank - 1);
    tma::replace(map, tma::Field::ElementType, 0, element_types[type]);
    tma::replace(map, tma::Field::Swizzle, 0, swizzle);
    for (uint32_t d = 0; d < rank; ++d) {
        tma::replace(map, tma::Field::GlobalDim, d, sizes[d]);
        tma::replace(map, tma::Field::BoxDim, d, box[d]);
        if (d) tma::replace(map, tma::Field::GlobalStride, d - 1, strides[d - 1]);
    }
    return kSuccess;
}

// After calls whose failure host code does not pass on to its caller.
void flash4_cuda_dialect_assert_success(int32_t error) {
    if (!error) return;
    std::fprintf(stderr, "%s\n", last_error.c_str());
    std::abort();
}

// For host code that is called through TVM-FFI: `state` is the function's own word, zero until its library is loaded.
// Loading calls Python, so a lock around it could meet Python's own the other way round; two threads that come first
// load a library each, which does no harm.

using SetError = void (*)(const char* kind, const char* message);
using SetErrorParts = void (*)(const char* kind, const char** parts, int32_t count);

int32_t flash4_cuda_dialect_init_library_once(Library** state, int32_t (*load)(Library**),
                                              int32_t (*load_to_device)(Library**, int32_t), SetError set_error) {
    const std::atomic_ref loaded(*state);
    if (loaded) return kSuccess;
    Library* library = nullptr;
    int32_t error = load(&library);
    if (!error) error = load_to_device(&library, 0);
    if (error) set_error("RuntimeError", last_error.c_str());
    else loaded = library;
    return error;
}

void flash4_cuda_dialect_unload_library_once(Library** state) {
    delete *state;
    *state = nullptr;
}

void flash4_CuteDSLRT_TVMFFISetRaisedCudaError(SetErrorParts set_error, int32_t) {
    const char* parts[] = {last_error.c_str()};
    set_error("RuntimeError", parts, 1);
}
}
