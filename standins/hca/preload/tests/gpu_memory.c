// Memory of a GPU under the device: `gpu_memory` moves bytes between two regions of it and the host, `gpu_memory lacks`
// expects that each way to register it is refused.
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK(x) do { if (!(x)) { perror(#x); exit(1); } } while (0)
enum { HALF = 1 << 20, RIGHTS = 15, LONG = 700001, REGISTERS = 7 };

static void *(*alloc)(size_t);
static char *(*bytes_of)(void *);
static unsigned (*map_registers)(void *, size_t, unsigned);
static unsigned (*export)(int *, unsigned long long, size_t, unsigned, unsigned long long);

static void find(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    OK(driver);
    OK(*(void **)&alloc = dlsym(driver, "fake_alloc"));
    OK(*(void **)&bytes_of = dlsym(driver, "fake_bytes"));
    OK(*(void **)&map_registers = dlsym(driver, "cuMemHostRegister_v2"));
    OK(*(void **)&export = dlsym(driver, "cuMemGetHandleForAddressRange"));
}

static struct ibv_qp *connected(struct ibv_context *c, struct ibv_pd *pd, struct ibv_cq *cq) {
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 16, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *q = ibv_create_qp(pd, &init);
    struct ibv_port_attr port;
    OK(q && !ibv_query_port(c, 1, &port));
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = RIGHTS};
    OK(!ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_4096;
    a.dest_qp_num = q->qp_num;
    a.max_dest_rd_atomic = 16;
    a.ah_attr.dlid = port.lid;
    a.ah_attr.port_num = 1;
    OK(!ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
                                 | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 21;
    a.retry_cnt = a.rnr_retry = 7;
    a.max_rd_atomic = 16;
    OK(!ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN
                                 | IBV_QP_MAX_QP_RD_ATOMIC));
    return q;
}

struct place { struct ibv_mr *mr; char *at; };

// Posts one request, and waits for its end.
static void post(struct ibv_qp *q, enum ibv_wr_opcode op, struct place to, struct place from, unsigned count) {
    struct ibv_sge sge = {(uintptr_t)from.at, count, from.mr->lkey};
    struct ibv_send_wr *bad, wr = {.opcode = op, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED};
    if (op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = (uintptr_t)to.at;
        wr.wr.atomic.rkey = to.mr->rkey;
        wr.wr.atomic.compare_add = 7;
    } else {
        wr.wr.rdma.remote_addr = (uintptr_t)to.at;
        wr.wr.rdma.rkey = to.mr->rkey;
    }
    OK(!ibv_post_send(q, &wr, &bad));
    struct ibv_wc wc;
    for (int i = 0; !ibv_poll_cq(q->send_cq, 1, &wc); i++) {
        OK(i < 2000000);
        usleep(100);
    }
    if (wc.status) {
        fprintf(stderr, "found %s\n", ibv_wc_status_str(wc.status));
        exit(1);
    }
}

int main(int count, char **args) {
    int lacks = count == 2 && !strcmp(args[1], "lacks"), n, fd;
    find();
    struct ibv_device **list = ibv_get_device_list(&n);
    OK(list && n == 1);
    struct mlx5dv_context_attr attr = {.flags = MLX5DV_CONTEXT_FLAGS_DEVX};
    struct ibv_context *c = mlx5dv_open_device(list[0], &attr);
    OK(c);
    struct ibv_pd *pd = ibv_alloc_pd(c);
    struct mlx5dv_devx_uar *uar = mlx5dv_devx_alloc_uar(c, MLX5DV_UAR_ALLOC_TYPE_NC);
    OK(pd && uar);
    char *gpu = alloc(2 * HALF), *other = gpu + HALF;
    OK(!export(&fd, (uintptr_t)other, HALF, 1, 0));
    struct ibv_mr *a = ibv_reg_mr(pd, gpu, HALF, RIGHTS);
    int why_a = errno;
    struct ibv_mr *b = ibv_reg_dmabuf_mr(pd, 0, HALF, (uintptr_t)other, fd, RIGHTS);
    int why_b = errno;
    unsigned mapped = map_registers(uar->base_addr, 4096, REGISTERS);
    OK(map_registers(list, 4096, REGISTERS) == 1);
    if (lacks) {
        OK(!a && why_a == EFAULT && !b && why_b == EINVAL && mapped == 1);
        printf("refused: memory by address, by dmabuf, registers\n");
        return 0;
    }
    OK(a && b && !mapped);
    // Beyond the end of what the descriptor stands for.
    OK(!ibv_reg_dmabuf_mr(pd, 4096, HALF, (uintptr_t)other, fd, RIGHTS));
    static char host[4096];
    struct ibv_mr *h = ibv_reg_mr(pd, host, sizeof host, RIGHTS);
    struct ibv_cq *cq = ibv_create_cq(c, 64, 0, 0, 0);
    OK(h && cq);
    struct ibv_qp *q = connected(c, pd, cq);
    for (int i = 0; i < HALF; i++)
        bytes_of(gpu)[i] = (char)(i * 7 + i / 251);
    // From one region of the GPU to the other, at odd places; a word; sums; to the host and back.
    post(q, IBV_WR_RDMA_WRITE, (struct place){b, other + 13}, (struct place){a, gpu + 5}, LONG);
    OK(!memcmp(bytes_of(other) + 13, bytes_of(gpu) + 5, LONG));
    post(q, IBV_WR_RDMA_WRITE, (struct place){b, other}, (struct place){a, gpu + 64}, 8);
    OK(!memcmp(bytes_of(other), bytes_of(gpu) + 64, 8));
    memset(bytes_of(other), 0, 8);
    for (int i = 0; i < 3; i++)
        post(q, IBV_WR_ATOMIC_FETCH_AND_ADD, (struct place){b, other}, (struct place){a, gpu + 4096}, 8);
    OK(*(long long *)bytes_of(other) == 21 && *(long long *)(bytes_of(gpu) + 4096) == 14);
    post(q, IBV_WR_RDMA_READ, (struct place){b, other + 13}, (struct place){h, host}, sizeof host);
    OK(!memcmp(bytes_of(other) + 13, host, sizeof host));
    host[100]++;
    post(q, IBV_WR_RDMA_WRITE, (struct place){a, gpu + 8192}, (struct place){h, host}, sizeof host);
    OK(!memcmp(bytes_of(gpu) + 8192, host, sizeof host));
    printf("standin0: memory of a GPU by address and by dmabuf\n");
    return 0;
}
