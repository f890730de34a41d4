//! `/v1/memory`: memory by the formula, and as measured.

use axum::Json;
use axum::extract::State;

use crate::api::{HostMemory, Memory, PoolSection};
use crate::config::memory_estimate::{host_bytes, queue_bytes};
use crate::control::handle::ControlHandle;
use crate::telemetry::process;

/// Shows the memory of the daemon: measured, and by the formula that `nvmfd check` prints.
#[utoipa::path(operation_id = "show_memory", get, path = "/v1/memory", responses((status = 200, body = Memory)))]
pub(super) async fn memory(State(managed): State<ControlHandle>) -> Json<Memory> {
    let (view, running) = (managed.view(), managed.running());
    let (plan, limits) = (running.config.pool_plan(), running.config.limits);
    let section = |name: &str, buffers, size_bytes| PoolSection {
        name: name.to_owned(),
        buffers,
        size_bytes,
    };
    let controllers = view.registry.controllers();
    let connected = controllers.iter().filter(|c| !c.discovery);
    Json(Memory {
        resident_bytes: process::look().resident_bytes,
        reactors: u32::try_from(view.reactors.len()).unwrap_or(u32::MAX),
        pool_bytes: view.pool_bytes,
        pool: vec![
            section("cells", Some(plan.cells), plan.cell_section()),
            section("receives", Some(plan.receives), plan.receive_section()),
            section("data", None, plan.data_section()),
        ],
        controllers_bytes: { connected }
            .map(|c| host_bytes(c.association.io_queues(), c.queue_depth))
            .sum(),
        host: HostMemory {
            io_queues: limits.io_queues,
            queue_depth: limits.queue_depth,
            io_queue_bytes: queue_bytes(limits.queue_depth),
            controller_bytes: host_bytes(0, 0),
            size_bytes: host_bytes(limits.io_queues, limits.queue_depth),
        },
        max_controllers: limits.controllers,
    })
}
