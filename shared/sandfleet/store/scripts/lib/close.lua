-- Answer an operation that no node will answer: closed, a tombstone for late messages.
local function close_op(op_id, route, client, ms, code, message, facts)
  local sid, node = split(route)
  local payload = failure(code, message, '"op_id":' .. cjson.encode(op_id) .. ',"sandbox_id":"' .. sid .. '"' .. facts)
  call('ZREM', P .. 'inflight:' .. node, op_id)
  call('ZREM', P .. 'busy:' .. sid, op_id)
  call('HSET', P .. 'op:' .. op_id, 'state', 'closed', 'outcome', code, 'finished', ms, 'reply', payload)
  reply(client, op_id, payload)
  if call('HGET', P .. 'op:' .. op_id, 'job') then end_output(op_id, code, true) end
  settle(sid, route, ms)
end

local function not_started(op_id, route, client, ms, reason)
  close_op(op_id, route, client, ms, 'not_started', 'the operation never began: ' .. reason, text('reason', reason))
end

local function unknown(op_id, route, client, ms, reason)
  close_op(op_id, route, client, ms, 'outcome_unknown',
    'the operation had begun and nobody can tell how it ended: ' .. reason, text('reason', reason))
end
