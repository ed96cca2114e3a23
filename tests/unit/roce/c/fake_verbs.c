/* As much of libibverbs as b12x's proxy calls: RC RDMA writes between processes of one host, over files they all map.

   A memory region is a file (SIM_FOLDER/region_R of rank R = SIM_RANK); its key is 1000 + R. A write is done when it is
   posted, in order, and completes when the queue is polled. SIM_FAIL_AT=n: from the n-th work request on, writes end in
   an error. SIM_DROP_FROM=n: from the n-th on, they are reported as done and are not. A test double: no NIC, no timing. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RANKS 16
#define DEPTH 8192

typedef struct { uint64_t base, bytes; } region_t;
struct queue { struct ibv_cq cq; struct ibv_wc entry[DEPTH]; unsigned head, tail; };
struct pair { struct ibv_qp qp; struct queue *sends; };
static struct { uint8_t *map; region_t region; } peers[RANKS];
static long posted;

/* What the ranks of a test use to play the kernel's part. */
uint32_t sim_load(uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void sim_store(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_SEQ_CST); }

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static void path_of(char *path, size_t size, const char *what, long rank) {
    snprintf(path, size, "%s/%s_%ld", getenv("SIM_FOLDER"), what, rank);
}

static uint8_t *remote(uint32_t key, uint64_t address, uint64_t bytes) {
    long rank = (long)key - 1000;
    if (rank < 0 || rank >= RANKS) return NULL;
    if (!peers[rank].map) {
        char path[256];
        path_of(path, sizeof path, "key", rank);
        int file = open(path, O_RDONLY);
        if (file < 0 || read(file, &peers[rank].region, sizeof(region_t)) != sizeof(region_t)) return NULL;
        close(file);
        path_of(path, sizeof path, "region", rank);
        file = open(path, O_RDWR);
        void *map = mmap(NULL, peers[rank].region.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (map == MAP_FAILED) return NULL;
        peers[rank].map = map;
    }
    region_t *region = &peers[rank].region;
    if (address < region->base || address + bytes > region->base + region->bytes) return NULL;
    return peers[rank].map + (address - region->base);
}

static void complete(struct queue *queue, uint64_t id, enum ibv_wc_status status) {
    struct ibv_wc *entry = &queue->entry[queue->tail++ % DEPTH];
    memset(entry, 0, sizeof *entry);
    entry->wr_id = id;
    entry->status = status;
    entry->opcode = IBV_WC_RDMA_WRITE;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **bad) {
    struct queue *queue = ((struct pair *)qp)->sends;
    long fail_at = number("SIM_FAIL_AT", 0), drop_from = number("SIM_DROP_FROM", 0);
    (void)bad;
    for (; request; request = request->next) {
        long count = __atomic_add_fetch(&posted, 1, __ATOMIC_RELAXED);
        struct ibv_sge *part = request->sg_list;
        uint8_t *to = remote(request->wr.rdma.rkey, request->wr.rdma.remote_addr, part->length);
        enum ibv_wc_status status = to ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR;
        if (fail_at && count >= fail_at) status = IBV_WC_RETRY_EXC_ERR;
        if (status == IBV_WC_SUCCESS && !(drop_from && count >= drop_from)) {
            if (part->length == 4) {
                uint32_t flag;
                memcpy(&flag, (void *)part->addr, 4);
                __atomic_store_n((uint32_t *)to, flag, __ATOMIC_RELEASE);
            } else {
                memcpy(to, (void *)part->addr, part->length);
            }
        }
        if (status != IBV_WC_SUCCESS || request->send_flags & IBV_SEND_SIGNALED) complete(queue, request->wr_id, status);
    }
    return 0;
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *out) {
    struct queue *queue = (struct queue *)cq;
    int count = 0;
    while (count < most && queue->head != queue->tail) out[count++] = queue->entry[queue->head++ % DEPTH];
    if (!count) sched_yield(); /* the real proxy spins; the cores of a test machine are shared */
    return count;
}

static struct ibv_device devices[2];
static struct ibv_device *list[3] = {&devices[0], &devices[1], NULL};

struct ibv_device **ibv_get_device_list(int *count) {
    strcpy(devices[0].name, "sim0");
    strcpy(devices[1].name, "sim1");
    if (count) *count = 2;
    return list;
}
void ibv_free_device_list(struct ibv_device **devices_) { (void)devices_; }
const char *ibv_get_device_name(struct ibv_device *device) { return device->name; }

struct ibv_context *ibv_open_device(struct ibv_device *device) {
    struct ibv_context *context = calloc(1, sizeof *context);
    context->device = device;
    context->ops.post_send = post_send;
    context->ops.poll_cq = poll_cq;
    return context;
}
int ibv_close_device(struct ibv_context *context) { free(context); return 0; }

#undef ibv_query_port
int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attributes) {
    (void)context;
    (void)port;
    struct ibv_port_attr *out = (void *)attributes;
    out->state = number("SIM_PORT_DOWN", 0) ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
    out->active_mtu = IBV_MTU_4096;
    out->lid = 0;
    return 0;
}
int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
    (void)context;
    (void)port;
    (void)index;
    memset(gid, 0, sizeof *gid);
    return 0;
}
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    struct ibv_pd *domain = calloc(1, sizeof *domain);
    domain->context = context;
    return domain;
}
int ibv_dealloc_pd(struct ibv_pd *domain) { free(domain); return 0; }

#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *domain, void *address, size_t bytes, int access) {
    (void)access;
    long rank = number("SIM_RANK", 0);
    struct ibv_mr *region = calloc(1, sizeof *region);
    region->context = domain->context;
    region->pd = domain;
    region->addr = address;
    region->length = bytes;
    region->lkey = region->rkey = (uint32_t)(1000 + rank);
    region_t record = {(uint64_t)address, bytes};
    char path[256];
    path_of(path, sizeof path, "key", rank);
    int file = open(path, O_CREAT | O_WRONLY | O_TRUNC, 0600);
    if (write(file, &record, sizeof record) != sizeof record) abort();
    close(file);
    return region;
}
int ibv_dereg_mr(struct ibv_mr *region) { free(region); return 0; }

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int depth, void *data, struct ibv_comp_channel *channel,
                             int vector) {
    (void)depth;
    (void)data;
    (void)channel;
    (void)vector;
    struct queue *queue = calloc(1, sizeof *queue);
    queue->cq.context = context;
    return &queue->cq;
}
int ibv_destroy_cq(struct ibv_cq *queue) { free(queue); return 0; }

struct ibv_qp *ibv_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *attributes) {
    static uint32_t count = 1;
    struct pair *pair = calloc(1, sizeof *pair);
    pair->qp.context = domain->context;
    pair->qp.qp_num = count++;
    pair->sends = (struct queue *)attributes->send_cq;
    return &pair->qp;
}
int ibv_destroy_qp(struct ibv_qp *pair) { free(pair); return 0; }
int ibv_modify_qp(struct ibv_qp *pair, struct ibv_qp_attr *attributes, int mask) {
    (void)pair;
    (void)attributes;
    (void)mask;
    return 0;
}
const char *ibv_wc_status_str(enum ibv_wc_status status) {
    if (status == IBV_WC_RETRY_EXC_ERR) return "transport retry counter exceeded";
    return status == IBV_WC_REM_ACCESS_ERR ? "remote access error" : "status";
}
