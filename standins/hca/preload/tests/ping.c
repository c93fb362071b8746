// Two processes over libibverbs: `ping FOLDER RANK`. Rank 1 writes, adds and sends to rank 0. Rank 0 posts its
// receive late, so that the sender has to wait for it.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK(x) do { if (!(x)) { perror(#x); exit(1); } } while (0)

struct info { unsigned qpn, lid, key; unsigned long long address; };
static struct { char bytes[4096]; unsigned long long total, old; } mem __attribute__((aligned(4096)));

// Leaves a record for the other rank, and waits for its own.
static void swap(const char *folder, const char *what, int rank, struct info *mine, struct info *theirs) {
    char path[4096], name[4096];
    snprintf(path, sizeof path, "%s/part-%d", folder, rank);
    snprintf(name, sizeof name, "%s/%s-%d", folder, what, rank);
    FILE *file = fopen(path, "w");
    OK(file && fwrite(mine, sizeof *mine, 1, file) == 1 && !fclose(file));
    OK(!rename(path, name));
    snprintf(name, sizeof name, "%s/%s-%d", folder, what, !rank);
    for (int i = 0; !(file = fopen(name, "r")); i++) {
        OK(i < 200000);
        usleep(1000);
    }
    OK(fread(theirs, sizeof *theirs, 1, file) == 1);
}

static struct ibv_wc wait_for(struct ibv_cq *cq) {
    struct ibv_wc wc;
    for (int i = 0, n; !(n = ibv_poll_cq(cq, 1, &wc)); i++) {
        OK(i < 2000000);
        usleep(100);
    }
    if (wc.status) {
        fprintf(stderr, "found %s\n", ibv_wc_status_str(wc.status));
        exit(1);
    }
    return wc;
}

static void connect_to(struct ibv_qp *q, struct info *peer) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 15};
    OK(!ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_4096;
    a.dest_qp_num = peer->qpn;
    a.max_dest_rd_atomic = 16;
    a.min_rnr_timer = 12;
    a.ah_attr.dlid = peer->lid;
    a.ah_attr.port_num = 1;
    OK(!ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
                                 | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 21;
    a.retry_cnt = 7;
    a.rnr_retry = 7;
    a.max_rd_atomic = 16;
    OK(!ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN
                                 | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void ask(struct ibv_qp *q, struct ibv_mr *mr, struct info *peer) {
    struct ibv_sge sge = {(uintptr_t)mem.bytes, 3000, mr->lkey}, old = {(uintptr_t)&mem.old, 8, mr->lkey};
    struct ibv_send_wr *bad, write = {.opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1,
        .wr.rdma = {peer->address, peer->key}};
    struct ibv_send_wr add = {.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .sg_list = &old, .num_sge = 1,
        .send_flags = IBV_SEND_SIGNALED, .wr.atomic = {peer->address + 4096, 7, 0, peer->key}};
    struct ibv_send_wr send = {.opcode = IBV_WR_SEND_WITH_IMM, .sg_list = &sge, .num_sge = 1,
        .send_flags = IBV_SEND_SIGNALED, .imm_data = 0x11223344};
    memset(mem.bytes, 'x', sizeof mem.bytes);
    OK(!ibv_post_send(q, &write, &bad));
    for (int i = 0; i < 3; i++)
        OK(!ibv_post_send(q, &add, &bad));
    for (int i = 0; i < 3; i++)
        wait_for(q->send_cq);
    OK(mem.old == 14);
    OK(!ibv_post_send(q, &send, &bad));
    wait_for(q->send_cq);
}

static void answer(struct ibv_qp *q, struct ibv_mr *mr) {
    for (int i = 0; *(volatile unsigned long long *)&mem.total != 21; i++) {
        OK(i < 2000000);
        usleep(100);
    }
    for (int i = 0; i < 3000; i++)
        OK(mem.bytes[i] == 'x');
    OK(mem.bytes[3000] == 0);
    // The message is on its way, and waits.
    usleep(50000);
    struct ibv_sge sge = {(uintptr_t)mem.bytes + 1000, 3000, mr->lkey};
    struct ibv_recv_wr *bad, wr = {.wr_id = 77, .sg_list = &sge, .num_sge = 1};
    OK(!ibv_post_recv(q, &wr, &bad));
    struct ibv_wc wc = wait_for(q->recv_cq);
    OK(wc.wr_id == 77 && wc.opcode == IBV_WC_RECV && wc.byte_len == 3000 && wc.imm_data == 0x11223344);
    OK(mem.bytes[3999] == 'x' && mem.bytes[4000] == 0);
}

int main(int count, char **args) {
    OK(count == 3);
    int rank = atoi(args[2]), n;
    struct ibv_device **list = ibv_get_device_list(&n);
    OK(list && n == 1);
    struct ibv_context *c = ibv_open_device(list[0]);
    OK(c);
    struct ibv_port_attr port;
    OK(!ibv_query_port(c, 1, &port) && port.state == IBV_PORT_ACTIVE);
    struct ibv_pd *pd = ibv_alloc_pd(c);
    struct ibv_mr *mr = ibv_reg_mr(pd, &mem, sizeof mem, 15);
    struct ibv_cq *cq = ibv_create_cq(c, 64, 0, 0, 0);
    OK(pd && mr && cq);
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 16, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *q = ibv_create_qp(pd, &init);
    OK(q);
    struct info mine = {q->qp_num, port.lid, mr->rkey, (uintptr_t)&mem}, theirs;
    swap(args[1], "info", rank, &mine, &theirs);
    connect_to(q, &theirs);
    struct info connected;
    swap(args[1], "connected", rank, &mine, &connected);
    if (rank)
        ask(q, mr, &theirs);
    else
        answer(q, mr);
    OK(!ibv_destroy_qp(q) && !ibv_destroy_cq(cq) && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(c));
    printf("%s: rank %d done\n", ibv_get_device_name(list[0]), rank);
    return 0;
}
