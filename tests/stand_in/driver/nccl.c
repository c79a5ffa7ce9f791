/* NCCL, as far as torch.distributed needs it: ranks meet at once, and collectives are launches that move nothing. */
/* Headers of small floats need those of C++, and nothing here needs them. */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

struct ncclComm { int rank, size, device; };

static ncclResult_t meet(ncclComm_t *comm, int size, int rank)
{
    if (fake_forbidden(UNSAFE, "ncclCommInitRank")) return ncclUnhandledCudaError;
    *comm = malloc(sizeof **comm);
    **comm = (struct ncclComm){rank, size, fake_device()};
    return ncclSuccess;
}
/* Memory must be that of the communicator's device. */
static ncclResult_t collective(const char *name, ncclComm_t comm, const void *from, const void *to, cudaStream_t stream)
{
    const void *given[] = {from, to};
    for (int i = 0; i < 2; i++) {
        fake_lock();
        Block *block = fake_block(given[i]);
        int on_device = block && block->kind == 2, device = block ? block->device : -1;
        fake_unlock();
        if (!on_device || device != comm->device)
            fake_violation("%s of device %d is given memory of %s %d", name, comm->device, on_device ? "device" : "the host", device);
    }
    return fake_launch(name, stream, COLLECTIVES) ? ncclUnhandledCudaError : ncclSuccess;
}

ncclResult_t ncclGetVersion(int *v) { *v = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { memset(id, 1, sizeof *id); return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t r) { return r ? "an error of the stand-in driver" : "no error"; }
const char *ncclGetLastError(ncclComm_t c) { (void)c; return ""; }
ncclResult_t ncclCommInitRank(ncclComm_t *c, int size, ncclUniqueId id, int rank) { (void)id; return meet(c, size, rank); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int size, ncclUniqueId id, int rank, ncclConfig_t *g) { (void)id; (void)g; return meet(c, size, rank); }
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int size, int rank, int n, ncclUniqueId *id, ncclConfig_t *g) { (void)n; (void)id; (void)g; return meet(c, size, rank); }
ncclResult_t ncclCommFinalize(ncclComm_t c) { (void)c; return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t c) { free(c); return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t c) { free(c); return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t c, int *n) { *n = c->size; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *n) { *n = c->rank; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *r) { (void)c; *r = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t c, void *p, size_t n, void **h) { (void)c; (void)n; *h = p; return ncclSuccess; }
ncclResult_t ncclCommDeregister(const ncclComm_t c, void *h) { (void)c; (void)h; return ncclSuccess; }
ncclResult_t ncclGroupStart(void) { return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return ncclSuccess; }
ncclResult_t ncclAllGather(const void *f, void *t, size_t n, ncclDataType_t d, ncclComm_t c, cudaStream_t s) { (void)n; (void)d; return collective("ncclAllGather", c, f, t, s); }
ncclResult_t ncclAllReduce(const void *f, void *t, size_t n, ncclDataType_t d, ncclRedOp_t o, ncclComm_t c, cudaStream_t s) { (void)n; (void)d; (void)o; return collective("ncclAllReduce", c, f, t, s); }
ncclResult_t ncclBroadcast(const void *f, void *t, size_t n, ncclDataType_t d, int r, ncclComm_t c, cudaStream_t s) { (void)n; (void)d; (void)r; return collective("ncclBroadcast", c, f, t, s); }
ncclResult_t ncclBcast(void *t, size_t n, ncclDataType_t d, int r, ncclComm_t c, cudaStream_t s) { (void)n; (void)d; (void)r; return collective("ncclBcast", c, t, t, s); }
