/* As much of libibverbs as b12x's proxy calls: RC RDMA writes between processes of one host.

   A registered region is reached through a file (SIM_FOLDER/nic_KEY) with one ring per sending rank. A sender puts its
   writes there in order; a thread beside the region, its NIC, carries them out in order: so the region may be any
   memory, CUDA's pinned memory too. SIM_RANK is this process's rank. SIM_FAIL_AT=n: from the n-th work request on,
   writes end in an error. SIM_DROP_FROM=n: from the n-th on, they are reported as done and are not. A test double: no
   timing, and the completion says that the NIC has the write, not that it has arrived. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define RANKS 16
#define KEYS 1024
#define DEPTH 8192
#define RING (1u << 20)
#define CHUNK (RING / 4)
#define FULL_S 10

typedef struct { uint64_t to, bytes; } message_t;
typedef struct { uint64_t head, pad_[7], tail, more_[7]; uint8_t data[RING]; } ring_t;
typedef struct { uint64_t base, bytes; ring_t from[RANKS]; } nic_t;
struct region { struct ibv_mr mr; nic_t *nic; pthread_t thread; int stop; };
struct queue { struct ibv_cq cq; struct ibv_wc entry[DEPTH]; unsigned head, tail; };
struct pair { struct ibv_qp qp; struct queue *sends; };
static nic_t *known[KEYS];
static long posted;

/* What the ranks of a test use to play the kernel's part. */
uint32_t sim_load(uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void sim_store(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_SEQ_CST); }

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static nic_t *map_nic(uint32_t key, int create) {
    char path[256];
    snprintf(path, sizeof path, "%s/nic_%u", getenv("SIM_FOLDER"), key);
    int file = open(path, O_RDWR | (create ? O_CREAT | O_TRUNC : 0), 0600);
    if (file < 0 || (create && ftruncate(file, sizeof(nic_t)))) return NULL;
    nic_t *nic = mmap(NULL, sizeof(nic_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return nic == MAP_FAILED ? NULL : nic;
}

static void copy_in(ring_t *ring, uint64_t at, const void *from, uint64_t bytes) {
    uint64_t start = at % RING, first = bytes < RING - start ? bytes : RING - start;
    memcpy(ring->data + start, from, first);
    memcpy(ring->data, (const uint8_t *)from + first, bytes - first);
}

static void copy_out(void *to, const ring_t *ring, uint64_t at, uint64_t bytes) {
    uint64_t start = at % RING, first = bytes < RING - start ? bytes : RING - start;
    memcpy(to, ring->data + start, first);
    memcpy((uint8_t *)to + first, ring->data, bytes - first);
}

static int put(ring_t *ring, uint64_t to, const void *from, uint64_t bytes) {
    message_t message = {to, bytes};
    uint64_t need = sizeof message + ((bytes + 7) & ~7ull), tail = ring->tail;
    time_t until = time(NULL) + FULL_S;
    while (tail + need - __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE) > RING) {
        if (time(NULL) > until) return 0;
        sched_yield();
    }
    copy_in(ring, tail, &message, sizeof message);
    copy_in(ring, tail + sizeof message, from, bytes);
    __atomic_store_n(&ring->tail, tail + need, __ATOMIC_RELEASE);
    return 1;
}

/* The NIC beside a region: every ring's writes in their order; a flag (4 bytes) is released after what came before it. */
static void *serve(void *argument) {
    struct region *region = argument;
    unsigned idle = 0;
    while (!__atomic_load_n(&region->stop, __ATOMIC_ACQUIRE)) {
        int busy = 0;
        for (int rank = 0; rank < RANKS; rank++) {
            ring_t *ring = &region->nic->from[rank];
            while (ring->head != __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE)) {
                message_t message;
                uint32_t flag;
                copy_out(&message, ring, ring->head, sizeof message);
                if (message.bytes == 4) {
                    copy_out(&flag, ring, ring->head + sizeof message, 4);
                    __atomic_store_n((uint32_t *)message.to, flag, __ATOMIC_RELEASE);
                } else {
                    copy_out((void *)message.to, ring, ring->head + sizeof message, message.bytes);
                }
                uint64_t used = sizeof message + ((message.bytes + 7) & ~7ull);
                __atomic_store_n(&ring->head, ring->head + used, __ATOMIC_RELEASE);
                busy = 1;
            }
        }
        idle = busy ? 0 : idle + 1;
        if (idle > 2000) nanosleep(&(struct timespec){0, 20000}, NULL); /* a test machine's cores are shared */
        else if (idle) sched_yield();
    }
    return NULL;
}

static enum ibv_wc_status remote_write(uint32_t key, uint64_t to, const uint8_t *from, uint64_t bytes) {
    if (key >= KEYS) return IBV_WC_REM_ACCESS_ERR;
    if (!known[key]) known[key] = map_nic(key, 0);
    nic_t *nic = known[key];
    if (!nic || to < nic->base || to + bytes > nic->base + nic->bytes) return IBV_WC_REM_ACCESS_ERR;
    ring_t *ring = &nic->from[number("SIM_RANK", 0)];
    for (uint64_t done = 0, part; done < bytes; done += part) {
        part = bytes - done < CHUNK ? bytes - done : CHUNK;
        /* 4 bytes are a flag: what is left of a payload must not look like one (payloads are whole 16 bytes). */
        if (!put(ring, to + done, from + done, part)) return IBV_WC_RETRY_EXC_ERR;
    }
    return IBV_WC_SUCCESS;
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
        enum ibv_wc_status status = IBV_WC_SUCCESS;
        if (fail_at && count >= fail_at) status = IBV_WC_RETRY_EXC_ERR;
        else if (!(drop_from && count >= drop_from))
            status = remote_write(request->wr.rdma.rkey, request->wr.rdma.remote_addr, (uint8_t *)part->addr, part->length);
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
    static uint32_t count;
    (void)access;
    struct region *region = calloc(1, sizeof *region);
    uint32_t key = RANKS * __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED) + (uint32_t)number("SIM_RANK", 0);
    region->mr.context = domain->context;
    region->mr.pd = domain;
    region->mr.addr = address;
    region->mr.length = bytes;
    region->mr.lkey = region->mr.rkey = key;
    region->nic = key < KEYS ? map_nic(key, 1) : NULL;
    if (!region->nic) return NULL;
    region->nic->base = (uint64_t)address;
    region->nic->bytes = bytes;
    if (pthread_create(&region->thread, NULL, serve, region)) return NULL;
    return &region->mr;
}
int ibv_dereg_mr(struct ibv_mr *mr) {
    struct region *region = (struct region *)mr;
    __atomic_store_n(&region->stop, 1, __ATOMIC_RELEASE);
    pthread_join(region->thread, NULL);
    munmap(region->nic, sizeof(nic_t));
    free(region);
    return 0;
}

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
