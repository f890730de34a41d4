//! The functions of rdma-core, found in its libraries by name.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

use super::types::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device_attr, ibv_mr, ibv_pd,
    ibv_qp, ibv_qp_attr, ibv_qp_init_attr, rdma_cm_event, rdma_cm_id, rdma_conn_param,
    rdma_event_channel,
};

macro_rules! api {
    ($($library:ident { $(fn $name:ident($($arg:ty),*) $(-> $ret:ty)?;)* })*) => {
        /// The entry points of rdma-core, found at run time, never unloaded.
        pub(crate) struct Api {
            $($(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*)*
            $(#[expect(dead_code, reason = "keeps the pointers good")] $library: Library,)*
        }

        impl Api {
            fn load() -> Result<Api, String> {
                $(let $library = open_library(concat!("lib", stringify!($library), ".so.1"))?;)*
                // SAFETY: the names and types are rdma-core's stable interface (compared with
                // rdma-sys below); the libraries stay loaded with the pointers.
                unsafe {
                    Ok(Api { $($($name: *$library
                        .get(concat!(stringify!($name), "\0").as_bytes())
                        .map_err(|e| format!("rdma-core is too old: {}", reason(&e)))?,)*)* $($library,)* })
                }
            }
        }

        /// The same signatures with the types of rdma-sys. Generic and never instantiated: type
        /// checked, but no code, hence no link dependency.
        #[cfg(all(test, feature = "layout-test"))]
        mod signatures {
            use std::ffi::{c_int, c_void};

            use rdma_sys::*;

            #[expect(dead_code, reason = "exists for the type checker")]
            #[expect(clippy::extra_unused_type_parameters, reason = "keeps it from being compiled")]
            fn signatures<Never>() {
                $($(let _: unsafe extern "C" fn($($arg),*) $(-> $ret)? = rdma_sys::$name;)*)*
            }
        }
    };
}

api! {
    ibverbs {
        fn ibv_ack_async_event(*mut ibv_async_event);
        fn ibv_ack_cq_events(*mut ibv_cq, u32);
        fn ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
        fn ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
        fn ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        fn ibv_dealloc_pd(*mut ibv_pd) -> c_int;
        fn ibv_dereg_mr(*mut ibv_mr) -> c_int;
        fn ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
        fn ibv_destroy_cq(*mut ibv_cq) -> c_int;
        fn ibv_get_async_event(*mut ibv_context, *mut ibv_async_event) -> c_int;
        fn ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        fn ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        fn ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        fn ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    }
    rdmacm {
        fn rdma_accept(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        fn rdma_ack_cm_event(*mut rdma_cm_event) -> c_int;
        fn rdma_bind_addr(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
        fn rdma_connect(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        fn rdma_create_event_channel() -> *mut rdma_event_channel;
        fn rdma_create_id(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, u32) -> c_int;
        fn rdma_create_qp(*mut rdma_cm_id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int;
        fn rdma_destroy_event_channel(*mut rdma_event_channel);
        fn rdma_destroy_id(*mut rdma_cm_id) -> c_int;
        fn rdma_destroy_qp(*mut rdma_cm_id);
        fn rdma_disconnect(*mut rdma_cm_id) -> c_int;
        fn rdma_free_devices(*mut *mut ibv_context);
        fn rdma_get_cm_event(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
        fn rdma_get_devices(*mut c_int) -> *mut *mut ibv_context;
        fn rdma_init_qp_attr(*mut rdma_cm_id, *mut ibv_qp_attr, *mut c_int) -> c_int;
        fn rdma_listen(*mut rdma_cm_id, c_int) -> c_int;
        fn rdma_migrate_id(*mut rdma_cm_id, *mut rdma_event_channel) -> c_int;
        fn rdma_reject(*mut rdma_cm_id, *const c_void, u8) -> c_int;
        fn rdma_resolve_addr(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        fn rdma_resolve_route(*mut rdma_cm_id, c_int) -> c_int;
        fn rdma_set_option(*mut rdma_cm_id, c_int, c_int, *mut c_void, usize) -> c_int;
    }
}

pub(super) fn open_library(name: &str) -> Result<Library, String> {
    // SAFETY: rdma-core's initialisers register its device drivers and nothing else.
    unsafe { Library::new(name) }.map_err(|e| {
        format!(
            "the verbs provider needs rdma-core ({name}: {}); on Debian and Ubuntu: apt install \
             libibverbs1 librdmacm1 ibverbs-providers; or use the soft provider, which needs none",
            reason(&e)
        )
    })
}

/// What the dynamic linker said.
fn reason(e: &libloading::Error) -> String {
    std::error::Error::source(e).map_or_else(|| e.to_string(), ToString::to_string)
}

impl Api {
    /// The libraries, loaded on first use.
    pub(crate) fn get() -> Result<&'static Api, String> {
        static API: OnceLock<Result<Api, String>> = OnceLock::new();
        API.get_or_init(Api::load).as_ref().map_err(Clone::clone)
    }
}
