/* A stand-in for the CUDA driver where there is none: device memory is a memfd in host memory, with the rules of
 * the real calls that the transport relies on. Compiled against the real header, which checks every signature.
 *
 * A shareable handle is one end of a socket pair in whose queue the memfd waits: as with the real driver, it is no
 * plain file, each export opens one of its own, and an import leaves it as it was.
 *
 * `standin_fail` makes the n-th call of a name from now on fail. Devices 0 and 1 reach each other, 2 reaches
 * nobody.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEVICES 3
#define UNIT 65536
#define MOST 64

/* Behind the memory lies one more page, which says whose it is. */
#define TAIL 4096

static int contexts[DEVICES];
static struct {
    CUdeviceptr at;
    size_t size;
    size_t mapped;
} ranges[MOST];
static char failing[64];
static int left;

int standin_contexts(int device) { return contexts[device]; }
int standin_ranges(void) {
    int count = 0;
    for (int i = 0; i < MOST; i++) count += ranges[i].at != 0;
    return count;
}
void standin_fail(const char* name, int nth) { snprintf(failing, sizeof failing, "%s", name), left = nth; }

static int fails(const char* name) { return !strcmp(name, failing) && --left == 0; }
#define ENTER \
    if (fails(__func__)) return CUDA_ERROR_OUT_OF_MEMORY
#define NEED(condition) \
    if (!(condition)) return CUDA_ERROR_INVALID_VALUE

CUresult cuInit(unsigned int flags) {
    ENTER;
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
    *text = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OUT_OF_MEMORY";
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
    ENTER;
    *count = DEVICES;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    ENTER;
    NEED(ordinal >= 0 && ordinal < DEVICES);
    *device = ordinal;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    ENTER;
    memset(uuid->bytes, 0xA0 + device, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    ENTER;
    NEED(attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
         attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    *value = device != 2;
    return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int* reaches, CUdevice device, CUdevice other) {
    ENTER;
    *reaches = device != other && device != 2 && other != 2;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    ENTER;
    *context = (CUcontext)&contexts[device];
    contexts[device]++;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER;
    contexts[device]--;
    return CUDA_SUCCESS;
}

static int right(const CUmemAllocationProp* p) {
    return p->type == CU_MEM_ALLOCATION_TYPE_PINNED && p->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           p->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && !p->win32HandleMetaData &&
           p->location.id >= 0 && p->location.id < DEVICES;
}
CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp* p,
                                       CUmemAllocationGranularity_flags option) {
    ENTER;
    NEED(right(p) && option == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    *size = UNIT;
    return CUDA_SUCCESS;
}
static size_t bytes(CUmemGenericAllocationHandle handle) {
    struct stat status;
    return fstat((int)handle, &status) ? 0 : (size_t)status.st_size - TAIL;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* p,
                     unsigned long long flags) {
    ENTER;
    NEED(right(p) && size && size % UNIT == 0 && !flags);
    int file = memfd_create("engine-standin", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size + TAIL)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (pwrite(file, &p->location.id, sizeof(int), (off_t)size) != sizeof(int)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (CUmemGenericAllocationHandle)file;
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER;
    NEED(!close((int)handle));
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER;
    NEED(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && !flags);
    int pair[2], file = (int)handle;
    NEED(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
    char data = 'm', space[CMSG_SPACE(sizeof file)] = {0};
    struct iovec part = {&data, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr* rights = CMSG_FIRSTHDR(&message);
    *rights =
        (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof file), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(rights), &file, sizeof file);
    ssize_t sent = sendmsg(pair[0], &message, 0);
    close(pair[0]);
    NEED(sent == 1);
    *(int*)out = pair[1];
    return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* from,
                                        CUmemAllocationHandleType type) {
    ENTER;
    NEED(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    char data, space[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&data, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ssize_t got = recvmsg((int)(uintptr_t)from, &message, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    struct cmsghdr* rights = got == 1 ? CMSG_FIRSTHDR(&message) : NULL;
    NEED(rights && rights->cmsg_type == SCM_RIGHTS);
    int file;
    memcpy(&file, CMSG_DATA(rights), sizeof file);
    *handle = (CUmemGenericAllocationHandle)file;
    return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* p, CUmemGenericAllocationHandle handle) {
    ENTER;
    memset(p, 0, sizeof *p);
    p->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    p->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    NEED(pread((int)handle, &p->location.id, sizeof(int), (off_t)bytes(handle)) == sizeof(int));
    return CUDA_SUCCESS;
}

static int range(CUdeviceptr at, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (at && ranges[i].at == at && ranges[i].size == size) return i;
    return -1;
}
CUresult cuMemAddressReserve(CUdeviceptr* at, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    ENTER;
    NEED(size && size % UNIT == 0 && alignment == UNIT && !wanted && !flags);
    int i = 0;
    while (i < MOST && ranges[i].at) i++;
    void* found = i < MOST ? mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    ranges[i].at = *at = (CUdeviceptr)found, ranges[i].size = size, ranges[i].mapped = 0;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
    ENTER;
    int i = range(at, size);
    NEED(i >= 0 && !ranges[i].mapped && !munmap((void*)at, size));
    ranges[i].at = 0;
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    ENTER;
    int i = range(at, size);
    NEED(i >= 0 && !ranges[i].mapped && !offset && !flags && size <= bytes(handle));
    NEED(mmap((void*)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, 0) == (void*)at);
    ranges[i].mapped = size;
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    ENTER;
    int i = range(at, size);
    NEED(i >= 0 && ranges[i].mapped);
    NEED(mmap((void*)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == (void*)at);
    ranges[i].mapped = 0;
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc* rights, size_t count) {
    ENTER;
    int i = range(at, size);
    NEED(i >= 0 && ranges[i].mapped && count > 0);
    for (size_t j = 0; j < count; j++)
        NEED(rights[j].location.type == CU_MEM_LOCATION_TYPE_DEVICE && contexts[rights[j].location.id] > 0 &&
             rights[j].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    NEED(!mprotect((void*)at, size, PROT_READ | PROT_WRITE));
    return CUDA_SUCCESS;
}
