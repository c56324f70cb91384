/* A driver's library in place of libcuda.so.1, for one device. Compiled against the true header, so
 * that every call of it has the true arguments. Device memory is host memory, and only accessible
 * while it is mapped. Calls with arguments that the real library refuses return its error. */
#define _GNU_SOURCE
#include <cuda.h>
#include <sys/mman.h>

#define UNIT (2ul << 20)
#define FREE (1ul << 30)
#undef cuMemGetInfo

static size_t allocated;
static int device_of_context = -1;

static int wrong(CUdeviceptr address, size_t size)
{
    return address % UNIT || size % UNIT || !size || device_of_context != 3;
}

static int is_wrong(const CUmemAllocationProp *p)
{
    const unsigned char *r = p->allocFlags.reserved;
    return p->type != CU_MEM_ALLOCATION_TYPE_PINNED || p->requestedHandleTypes ||
           p->location.type != CU_MEM_LOCATION_TYPE_DEVICE || p->location.id != 3 ||
           p->win32HandleMetaData || p->allocFlags.compressionType ||
           p->allocFlags.gpuDirectRDMACapable != 1 || p->allocFlags.usage || r[0] || r[3];
}

static int protect(CUdeviceptr address, size_t size, int protection)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    return mmap((void *)address, size, protection, flags, -1, 0) == MAP_FAILED;
}

CUresult cuInit(unsigned int flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    *value = attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED && device == 3;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    *context = (CUcontext)(size_t)(0x1000 + device);
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    device_of_context = (int)((size_t)context - 0x1000);
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) { return wrong(0, UNIT) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
    *total = FREE;
    *free = FREE - allocated;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option)
{
    *granularity = UNIT;
    return is_wrong(prop) || option != CU_MEM_ALLOC_GRANULARITY_MINIMUM ? CUDA_ERROR_INVALID_VALUE
                                                                      : CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                             unsigned long long flags)
{
    if (wrong(0, size) || alignment || addr || flags)
        return CUDA_ERROR_INVALID_VALUE;
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size_t found = (size_t)mmap(0, size + UNIT, PROT_NONE, how, -1, 0);
    *ptr = (found + UNIT - 1) / UNIT * UNIT;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const CUmemAllocationProp *prop, unsigned long long flags)
{
    if (wrong(0, size) || is_wrong(prop) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (allocated + size > FREE)
        return CUDA_ERROR_OUT_OF_MEMORY;
    allocated += size;
    *handle = 1ull << 40 | size;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    allocated -= handle & ~(1ull << 40);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    int bad = wrong(ptr, size) || offset || flags || handle != (1ull << 40 | size);
    return bad ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    if (wrong(ptr, size) || count != 1 || desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE ||
        desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc->location.id != 3)
        return CUDA_ERROR_INVALID_VALUE;
    return protect(ptr, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    int bad = wrong(ptr, size) || protect(ptr, size, PROT_NONE);
    return bad ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
