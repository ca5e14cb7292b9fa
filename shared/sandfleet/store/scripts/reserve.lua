-- Take a place on a node for a thread that has no sandbox; the new owner gets a larger epoch.
-- KEYS  1 prefix
-- ARGV  1 digest  2 thread id  3 user id or ''  4 backend  5 spec JSON  6 node  7 incarnation  8 data id
--       9 expires ms  10… candidate sandbox ids
-- Returns {status, route}
--@use time route story reply waiters sandbox
local ms = now_ms()
local state, old_sid, old_route, old_node = thread_state(A[1], ms)
if state == 'live' then
  grant_waiters(A[1], old_route, ms, 'false')
  return { 'live', old_route }
elseif state then
  return { 'creating', old_route }
end

local thread = P .. 'thread:' .. A[1]
local last = call('HGET', thread, 'epoch')
if not last and tonumber(call('HGET', P .. 'fleet', 'recovering') or 0) > ms then return { 'recovering' } end

local node = A[6]
local n = call('HMGET', P .. 'node:' .. node, 'state', 'incarnation', 'replicas')
if n[1] ~= 'ready' or n[2] ~= A[7] or call('GET', P .. 'lease:' .. node) ~= A[7] then return { 'node_down' } end
local places = P .. 'places:' .. node
local taken = call('ZCOUNT', places, '(' .. ms, '+inf')
if old_node == node and tonumber(call('ZSCORE', places, old_sid) or 0) > ms then taken = taken - 1 end
if taken >= tonumber(n[3]) then return { 'full' } end
local sid
for i = 10, #A do
  local holder = call('GET', P .. 'id:' .. A[i])
  if not holder or holder == A[1] then
    sid = A[i]
    break
  end
end

local t = call('TIME')
local epoch = math.max(tonumber(last or 0) + 1, t[1] * 1000000 + t[2])
local epoch_text = string.format('%.0f', epoch)
local route = sid .. '|' .. node .. '|' .. A[7] .. '|' .. epoch_text
call('HSET', thread, 'sandbox_id', sid, 'data_id', A[8], 'epoch', epoch_text)
call('PEXPIRE', thread, KEEP)
if old_sid then forget(old_sid, old_route) end
call('SET', P .. 'id:' .. sid, A[1], 'PX', KEEP)
call('HSET', P .. 'sandbox:' .. sid, 'owner', A[1], 'state', 'creating', 'route', route, 'thread', A[2],
  'user', A[3], 'backend', A[4], 'spec', A[5], 'created', ms, 'used', ms)
call('PEXPIRE', P .. 'sandbox:' .. sid, KEEP)
call('ZADD', places, ms + tonumber(A[9]), sid)
keep(places, KEEP)
call('ZADD', P .. 'sandboxes', 0, sid)
keep(P .. 'sandboxes', KEEP)
story(sid, ms, 'reserved', where(route))
return { 'reserved', route }
