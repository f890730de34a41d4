/* The functions of rdma-core that the provider verbs uses, over a device of this process: each work
 * request is executed when it is posted, by one memcpy. One thread, no faults, nothing is checked:
 * for counting what the provider itself costs (`cost --verbs`).
 *
 *   gcc -shared -fPIC -o libibverbs.so.1 null_verbs.c; cp libibverbs.so.1 librdmacm.so.1
 *
 * Only librdmacm.so.1 has a state; of libibverbs.so.1 the provider uses functions on what the former
 * has made. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#undef ibv_reg_mr

#define NEW(type) ((type *)calloc(1, sizeof(type)))

struct channel { /* of completions */
	struct ibv_comp_channel ibv;
	struct queue *announced[16];
	unsigned head, tail;
};
struct queue { /* of completions */
	struct ibv_cq ibv;
	struct ibv_wc *entries;
	unsigned head, tail, size;
	int armed;
};
struct pair {
	struct ibv_qp ibv;
	struct pair *peer;
	struct queue *sent, *received;
	struct ibv_sge *sinks; /* of posted receives */
	uint64_t *ids;
	unsigned head, tail, size;
	int all, failed;
};
struct id {
	struct rdma_cm_id cm;
	struct id *peer;
	uint8_t reads;
	struct id *next; /* listener */
};
struct event {
	struct rdma_cm_event cm;
	uint8_t data[256];
	struct event *next;
};
struct events { /* of the connection manager */
	struct rdma_event_channel cm;
	struct event *first;
};

static struct id *listeners;

static void need(int condition, const char *what)
{
	if (!condition) {
		fprintf(stderr, "null_verbs: %s\n", what);
		abort();
	}
}

/* Completions */

static void complete(struct queue *queue, struct pair *pair, uint64_t id, enum ibv_wc_opcode opcode,
		     uint32_t bytes)
{
	need(queue->tail - queue->head < queue->size, "a completion queue overflows");
	struct ibv_wc *wc = &queue->entries[queue->tail++ % queue->size];
	memset(wc, 0, sizeof *wc);
	wc->wr_id = id;
	wc->opcode = opcode;
	wc->byte_len = bytes;
	wc->status = pair->failed ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS;
	if (queue->armed) {
		struct channel *channel = (struct channel *)queue->ibv.channel;
		queue->armed = 0;
		channel->announced[channel->tail++ % 16] = queue;
		eventfd_write(channel->ibv.fd, 1);
	}
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *wc)
{
	struct queue *queue = (struct queue *)cq;
	int count = 0;
	while (count < most && queue->head != queue->tail)
		wc[count++] = queue->entries[queue->head++ % queue->size];
	return count;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited)
{
	(void)solicited;
	((struct queue *)cq)->armed = 1;
	return 0;
}

/* Work requests */

static void fail(struct pair *pair)
{
	pair->failed = 1;
	for (; pair->head != pair->tail; pair->head++)
		complete(pair->received, pair, pair->ids[pair->head % pair->size], IBV_WC_RECV, 0);
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct pair *pair = (struct pair *)qp;
	(void)bad;
	for (; wr; wr = wr->next) {
		need(pair->tail - pair->head < pair->size, "a receive queue overflows");
		pair->ids[pair->tail % pair->size] = wr->wr_id;
		pair->sinks[pair->tail++ % pair->size] = *wr->sg_list;
	}
	if (pair->failed)
		fail(pair);
	return 0;
}

static void receive(struct pair *to, const void *bytes, uint32_t count)
{
	need(to->head != to->tail, "a message without a posted receive");
	unsigned at = to->head++ % to->size;
	need(count <= to->sinks[at].length, "a message that is longer than its receive");
	memcpy((void *)(uintptr_t)to->sinks[at].addr, bytes, count);
	complete(to->received, to, to->ids[at], IBV_WC_RECV, count);
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct pair *pair = (struct pair *)qp;
	(void)bad;
	for (; wr; wr = wr->next) {
		uint32_t count = wr->num_sge ? wr->sg_list->length : 0;
		void *local = (void *)(uintptr_t)wr->sg_list->addr;
		void *remote = (void *)(uintptr_t)wr->wr.rdma.remote_addr;
		if (!pair->failed && wr->opcode == IBV_WR_RDMA_WRITE)
			memcpy(remote, local, count);
		else if (!pair->failed && wr->opcode == IBV_WR_RDMA_READ)
			memcpy(local, remote, count);
		else if (!pair->failed && pair->peer && !pair->peer->failed)
			receive(pair->peer, local, count);
		if (pair->all || pair->failed || wr->send_flags & IBV_SEND_SIGNALED)
			complete(pair->sent, pair, wr->wr_id, IBV_WC_SEND, count);
	}
	return 0;
}

/* Objects of libibverbs */

static struct ibv_device device = { .transport_type = IBV_TRANSPORT_IB, .name = "null0" };
static struct ibv_context context = {
	.device = &device,
	.ops = { .poll_cq = poll_cq, .req_notify_cq = req_notify_cq,
		 .post_send = post_send, .post_recv = post_recv },
	.cmd_fd = -1, .async_fd = -1, .num_comp_vectors = 1,
};

int ibv_query_device(struct ibv_context *of, struct ibv_device_attr *attr)
{
	(void)of;
	memset(attr, 0, sizeof *attr);
	attr->max_qp = attr->max_qp_wr = attr->max_cqe = 1 << 20;
	attr->max_sge = 1;
	attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = 16;
	attr->device_cap_flags = IBV_DEVICE_MEM_MGT_EXTENSIONS;
	return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *of)
{
	struct ibv_pd *pd = NEW(struct ibv_pd);
	pd->context = of;
	return pd;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	static uint32_t key;
	struct ibv_mr *mr = NEW(struct ibv_mr);
	(void)access;
	*mr = (struct ibv_mr){ pd->context, pd, addr, length, 0, ++key, key };
	return mr;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *of)
{
	struct channel *channel = NEW(struct channel);
	channel->ibv.context = of;
	channel->ibv.fd = eventfd(0, EFD_SEMAPHORE | EFD_NONBLOCK);
	return &channel->ibv;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *of, int size, void *data,
			     struct ibv_comp_channel *channel, int vector)
{
	struct queue *queue = NEW(struct queue);
	(void)data, (void)vector;
	queue->ibv.context = of;
	queue->ibv.channel = channel;
	queue->ibv.cqe = queue->size = size;
	queue->entries = calloc(size, sizeof *queue->entries);
	return &queue->ibv;
}

int ibv_get_cq_event(struct ibv_comp_channel *of, struct ibv_cq **cq, void **data)
{
	struct channel *channel = (struct channel *)of;
	eventfd_t count;
	if (eventfd_read(of->fd, &count))
		return -1;
	*cq = &channel->announced[channel->head++ % 16]->ibv;
	*data = NULL;
	return 0;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (mask & IBV_QP_STATE && attr->qp_state == IBV_QPS_ERR)
		fail((struct pair *)qp);
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count) { (void)cq, (void)count; }
int ibv_get_async_event(struct ibv_context *of, struct ibv_async_event *event)
{
	(void)of, (void)event;
	errno = EAGAIN;
	return -1;
}
void ibv_ack_async_event(struct ibv_async_event *event) { (void)event; }
/* What a process has made it keeps to its end. */
int ibv_dealloc_pd(struct ibv_pd *pd) { (void)pd; return 0; }
int ibv_dereg_mr(struct ibv_mr *mr) { free(mr); return 0; }
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) { return close(channel->fd); }
int ibv_destroy_cq(struct ibv_cq *cq) { (void)cq; return 0; }

/* The connection manager */

static void report(struct id *id, struct rdma_event_channel *to, enum rdma_cm_event_type type,
		   const void *data, uint8_t bytes)
{
	struct event *event = NEW(struct event), **last = &((struct events *)to)->first;
	event->cm.id = &id->cm;
	event->cm.event = type;
	if (bytes)
		event->cm.param.conn.private_data = memcpy(event->data, data, bytes);
	event->cm.param.conn.private_data_len = bytes;
	event->cm.param.conn.initiator_depth = id->reads;
	while (*last)
		last = &(*last)->next;
	*last = event;
	eventfd_write(to->fd, 1);
}

struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct events *events = NEW(struct events);
	events->cm.fd = eventfd(0, EFD_SEMAPHORE | EFD_NONBLOCK);
	return &events->cm;
}

void rdma_destroy_event_channel(struct rdma_event_channel *channel) { close(channel->fd); }

int rdma_get_cm_event(struct rdma_event_channel *of, struct rdma_cm_event **out)
{
	struct event **first = &((struct events *)of)->first;
	eventfd_t count;
	if (eventfd_read(of->fd, &count))
		return -1;
	*out = &(*first)->cm;
	*first = (*first)->next;
	return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *event) { free(event); return 0; }

struct ibv_context **rdma_get_devices(int *count)
{
	struct ibv_context **list = calloc(2, sizeof *list);
	list[0] = &context;
	*count = 1;
	return list;
}

void rdma_free_devices(struct ibv_context **list) { free(list); }

int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **out, void *data,
		   enum rdma_port_space space)
{
	(void)data, (void)space;
	*out = &NEW(struct id)->cm;
	(*out)->channel = channel;
	return 0;
}

int rdma_destroy_id(struct rdma_cm_id *id)
{
	for (struct id **at = &listeners; *at; at = &(*at)->next)
		if (&(*at)->cm == id) {
			*at = (*at)->next;
			break;
		}
	return 0;
}

int rdma_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *to)
{
	id->channel = to;
	return 0;
}

int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t bytes)
{
	(void)id, (void)level, (void)name, (void)value, (void)bytes;
	return 0;
}

static size_t address_bytes(const struct sockaddr *at)
{
	return at->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *at)
{
	memcpy(&id->route.addr.src_storage, at, address_bytes(at));
	id->verbs = &context;
	return 0;
}

int rdma_listen(struct rdma_cm_id *cm, int backlog)
{
	struct id *id = (struct id *)cm;
	(void)backlog;
	id->next = listeners;
	listeners = id;
	return 0;
}

int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int ms)
{
	(void)ms;
	rdma_bind_addr(id, from ? from : to);
	memcpy(&id->route.addr.dst_storage, to, address_bytes(to));
	report((struct id *)id, id->channel, RDMA_CM_EVENT_ADDR_RESOLVED, NULL, 0);
	return 0;
}

int rdma_resolve_route(struct rdma_cm_id *id, int ms)
{
	(void)ms;
	report((struct id *)id, id->channel, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL, 0);
	return 0;
}

int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct pair *pair = NEW(struct pair);
	static uint32_t number;
	pair->ibv.context = pd->context;
	pair->ibv.qp_num = ++number;
	pair->sent = (struct queue *)attr->send_cq;
	pair->received = (struct queue *)attr->recv_cq;
	pair->size = attr->cap.max_recv_wr;
	pair->sinks = calloc(pair->size, sizeof *pair->sinks);
	pair->ids = calloc(pair->size, sizeof *pair->ids);
	pair->all = attr->sq_sig_all;
	id->qp = &pair->ibv;
	return 0;
}

void rdma_destroy_qp(struct rdma_cm_id *id)
{
	struct pair *pair = (struct pair *)id->qp;
	if (pair->peer)
		pair->peer->peer = NULL;
	free(pair->sinks), free(pair->ids), free(pair);
	id->qp = NULL;
}

/* For captures. */
int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
	(void)id, (void)attr, (void)mask;
	errno = ENOSYS;
	return -1;
}

int rdma_connect(struct rdma_cm_id *cm, struct rdma_conn_param *param)
{
	struct id *id = (struct id *)cm, *to = listeners, *other = NEW(struct id);
	const struct sockaddr_storage *at = &cm->route.addr.dst_storage;
	while (to && memcmp(&to->cm.route.addr.src_storage, at, sizeof(struct sockaddr_in)))
		to = to->next;
	need(to != NULL, "nobody listens");
	other->cm.verbs = &context;
	other->cm.channel = to->cm.channel;
	other->cm.route.addr.src_storage = cm->route.addr.dst_storage;
	other->cm.route.addr.dst_storage = cm->route.addr.src_storage;
	other->reads = param->responder_resources;
	other->peer = id;
	id->peer = other;
	report(other, to->cm.channel, RDMA_CM_EVENT_CONNECT_REQUEST, param->private_data,
	       param->private_data_len);
	return 0;
}

int rdma_accept(struct rdma_cm_id *cm, struct rdma_conn_param *param)
{
	struct id *id = (struct id *)cm;
	struct pair *pair = (struct pair *)cm->qp, *peer = (struct pair *)id->peer->cm.qp;
	pair->peer = peer;
	peer->peer = pair;
	report(id, cm->channel, RDMA_CM_EVENT_ESTABLISHED, NULL, 0);
	report(id->peer, id->peer->cm.channel, RDMA_CM_EVENT_ESTABLISHED, param->private_data,
	       param->private_data_len);
	return 0;
}

int rdma_reject(struct rdma_cm_id *cm, const void *data, uint8_t bytes)
{
	struct id *peer = ((struct id *)cm)->peer;
	report(peer, peer->cm.channel, RDMA_CM_EVENT_REJECTED, data, bytes);
	return 0;
}

int rdma_disconnect(struct rdma_cm_id *cm)
{
	struct id *id = (struct id *)cm;
	if (cm->qp)
		fail((struct pair *)cm->qp);
	report(id, cm->channel, RDMA_CM_EVENT_DISCONNECTED, NULL, 0);
	if (id->peer)
		report(id->peer, id->peer->cm.channel, RDMA_CM_EVENT_DISCONNECTED, NULL, 0);
	return 0;
}
